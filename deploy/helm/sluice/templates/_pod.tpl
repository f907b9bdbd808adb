{{/* Seconds in which a pod that ends still gets requests: its address leaves the Services meanwhile. */}}
{{- define "sluice.leavingSeconds" -}}5{{- end -}}

{{/* Fields of every pod: dict root, component, model, settings (nodeSelector, tolerations, affinity). */}}
{{- define "sluice.pod" -}}
{{- /* The autoscaler of Ray, which KubeRay adds to the head, calls the API of Kubernetes. */}}
automountServiceAccountToken: {{ eq .component "ray-head" }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add (include "sluice.leavingSeconds" .) .root.Values.exitTimeoutSeconds 10 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "sluice.selector" . | nindent 8 }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" }}
{{- with get $.settings $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Fields of every container: dict root, image, resources. */}}
{{- define "sluice.container" -}}
image: {{ printf "%s:%s" .image.repository .image.tag | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- with .resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  allowPrivilegeEscalation: false
  privileged: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities:
    drop:
      - ALL
  seccompProfile:
    type: RuntimeDefault
lifecycle:
  preStop:
    sleep:
      seconds: {{ include "sluice.leavingSeconds" . }}
{{- end -}}

{{/* Options that routers and replicas have in common. */}}
{{- define "sluice.arguments" -}}
- --model-repository=/models
- {{ printf "--fleet-name=%s" .Values.fleet.name | quote }}
- --fleet-secret-file=/etc/sluice/fleet/secret
- --fleet-zone=$(SLUICE_ZONE)
- --exit-timeout-secs={{ .Values.exitTimeoutSeconds }}
{{- /* Proxies have few addresses, in the pod or before it: changes of the server are answered in the pod
only, and connections of an address are not limited. */}}
- --admin-port=8004
- --max-connections-per-address=0
- --playground=false
{{- end -}}

{{/* Environment of routers and replicas: dict env. Kubernetes 1.35 and later copy the zone of the node to the
labels of its pods; without the label it is empty. */}}
{{- define "sluice.env" -}}
env:
  - name: SLUICE_ZONE
    valueFrom:
      fieldRef:
        fieldPath: metadata.labels['topology.kubernetes.io/zone']
  {{- with .env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "sluice.probes" -}}
startupProbe:
  httpGet:
    path: /v2/health/ready
    port: http
  periodSeconds: 10
  failureThreshold: 180
readinessProbe:
  httpGet:
    path: /v2/health/ready
    port: http
  periodSeconds: 2
  failureThreshold: 2
livenessProbe:
  httpGet:
    path: /v2/health/live
    port: http
  periodSeconds: 10
  failureThreshold: 6
  timeoutSeconds: 5
{{- end -}}

{{- define "sluice.mounts" -}}
- name: models
  mountPath: /models
  readOnly: true
- name: fleet
  mountPath: /etc/sluice/fleet
  readOnly: true
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /var/cache/sluice
- name: state
  mountPath: /var/lib/sluice
{{- end -}}

{{/* dict root, models, cache: volume sources, by default empty folders. */}}
{{- define "sluice.volumes" -}}
- name: models
  {{- toYaml (.models | default (dict "emptyDir" dict)) | nindent 2 }}
- name: fleet
  secret:
    secretName: {{ include "sluice.secret" .root | quote }}
    defaultMode: 0440
- name: tmp
  emptyDir: {}
- name: cache
  {{- toYaml (.cache | default (dict "emptyDir" dict)) | nindent 2 }}
- name: state
  emptyDir: {}
{{- end -}}

{{/* The container of a router: dict root, image, resources, fleet (the value of --fleet), arguments, env, mounts. */}}
{{- define "sluice.router" -}}
name: router
{{ include "sluice.container" . }}
args:
  - serve
  {{- include "sluice.arguments" .root | nindent 2 }}
  - {{ printf "--fleet=%s" .fleet | quote }}
  - --fleet-address=0.0.0.0
  - --fleet-port=8003
  {{- range .arguments }}
  - {{ . | quote }}
  {{- end }}
{{ include "sluice.env" . }}
ports:
  - name: http
    containerPort: 8000
  - name: grpc
    containerPort: 8001
  - name: metrics
    containerPort: 8002
  - name: fleet
    containerPort: 8003
{{ include "sluice.probes" .root }}
volumeMounts:
  {{- include "sluice.mounts" .root | nindent 2 }}
  {{- range .mounts }}
  - {{ toYaml . | nindent 4 | trim }}
  {{- end }}
{{- end -}}

{{/* The budget of a component: dict root, component, model, limit (the line that limits). */}}
{{- define "sluice.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "sluice.name" .root }}-{{ .model | default .component }}
  labels:
    {{- include "sluice.labels" . | nindent 4 }}
spec:
  {{ .limit }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "sluice.selector" . | nindent 6 }}
{{- end -}}
