// A small live plot of the last two minutes; a second without a value leaves a gap.

const SECS = 120;
const WIDTH = 120;
const HEIGHT = 32;
const SVG = "http://www.w3.org/2000/svg";

export class Plot {
  constructor() {
    this.element = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "plot", role: "img" });
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line" });
    this.element.append(svg("path", { class: "floor", d: `M0 ${HEIGHT - 1}H${WIDTH}` }), this.area, this.line);
  }

  // Points of { time, value }; `most` is the top of the plot, by default the highest value.
  draw(points, label, most = Math.max(...points.map((point) => point.value ?? 0), 1e-9)) {
    const now = points.at(-1)?.time ?? 0;
    const runs = [];
    for (const { time, value } of points) {
      if (value === null) runs.push([]);
      else (runs.at(-1) ?? runs[runs.push([]) - 1]).push(place(time, value, now, most));
    }
    const drawn = runs.filter((run) => run.length);
    this.line.setAttribute("d", drawn.map(stroke).join(""));
    this.area.setAttribute("d", drawn.map(fill).join(""));
    this.element.setAttribute("aria-label", label);
  }
}

function place(time, value, now, most) {
  const x = WIDTH - ((now - time) / SECS) * WIDTH;
  const y = HEIGHT - 1 - Math.min(value / most, 1) * (HEIGHT - 4);
  return [x.toFixed(2), y.toFixed(2)];
}

// A point that stands alone is a bar.
function stroke(run) {
  const [[x, y], ...rest] = run;
  return `M${x} ${y}` + (rest.length ? rest.map((point) => `L${point.join(" ")}`).join("") : `V${HEIGHT - 1}`);
}

function fill(run) {
  if (run.length < 2) return "";
  const line = run.map((point) => point.join(" ")).join("L");
  return `M${run[0][0]} ${HEIGHT - 1}L${line}L${run.at(-1)[0]} ${HEIGHT - 1}Z`;
}

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
