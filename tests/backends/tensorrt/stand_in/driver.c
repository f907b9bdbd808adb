/* A stand-in for the CUDA driver as far as the gateway asks it: one GPU of capability 9.0. */

int cuInit(unsigned int flags) { return flags ? 1 : 0; }

int cuDeviceGetCount(int *count) {
    *count = 1;
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal ? 101 : 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : 0;
    return device ? 101 : 0;
}
