// A small line of the last values, drawn as SVG.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 120;
const HEIGHT = 28;

export class Sparkline {
  constructor(capacity = 60) {
    this.capacity = capacity;
    this.values = [];
    this.root = document.createElementNS(SVG, "svg");
    this.root.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.root.setAttribute("preserveAspectRatio", "none");
    this.root.setAttribute("class", "spark");
    this.root.setAttribute("aria-hidden", "true");
    this.area = this.root.appendChild(document.createElementNS(SVG, "path"));
    this.line = this.root.appendChild(document.createElementNS(SVG, "path"));
    this.area.setAttribute("class", "area");
    this.line.setAttribute("class", "line");
  }

  add(value, limit) {
    this.values.push(value);
    if (this.values.length > this.capacity) this.values.shift();
    const highest = limit ?? Math.max(1e-9, ...this.values);
    const step = WIDTH / (this.capacity - 1);
    const offset = WIDTH - (this.values.length - 1) * step;
    const points = this.values.map((each, index) => {
      const y = HEIGHT - 1.5 - Math.min(1, each / highest) * (HEIGHT - 4);
      return `${(offset + index * step).toFixed(1)} ${y.toFixed(1)}`;
    });
    const line = `M${points.join("L")}`;
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", `${line}L${WIDTH} ${HEIGHT}L${offset.toFixed(1)} ${HEIGHT}Z`);
  }
}
