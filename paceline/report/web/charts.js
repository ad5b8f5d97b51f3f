"use strict";
// Figures over the steps, as uPlot draws them; restarts, skipped steps and checkpoints as vertical lines with a letter.
// Memory over one step is drawn alike.
const charts = (() => {
  const places = [...document.querySelectorAll(".chart")], sources = new Map();
  for (const { dataset: { from } } of places) {
    if (!sources.has(from)) sources.set(from, JSON.parse(document.getElementById(from).textContent));
  }
  const DASHES = [[], [6, 4]], MARKS = { restart: ["R", [2, 3]], skipped: ["S", [8, 3]], checkpoint: ["C", [1, 5]] };
  // Steps are whole numbers.
  const WHOLE = Array.from({ length: 15 }, (_, power) => [1, 2, 5].map((k) => k * 10 ** power)).flat();
  let drawn = [];

  function mark(plot, marks) {
    const pen = plot.ctx, { left, top, width, height } = plot.bbox, ratio = window.devicePixelRatio || 1;
    pen.save();
    pen.strokeStyle = pen.fillStyle = drawing.colour("soft");
    pen.lineWidth = ratio;
    pen.font = `${10 * ratio}px system-ui, sans-serif`;
    for (const [name, [letter, dash]] of Object.entries(MARKS)) {
      pen.setLineDash(dash.map((long) => long * ratio));
      for (const step of marks[name] || []) {
        const at = plot.valToPos(step, "x", true);
        if (at < left || at > left + width) continue;
        pen.beginPath();
        pen.moveTo(at, top);
        pen.lineTo(at, top + height);
        pen.stroke();
        // At the right edge there is room for a letter on the left alone.
        const isLast = at + 12 * ratio > left + width;
        pen.textAlign = isLast ? "right" : "left";
        pen.fillText(letter, at + (isLast ? -2 : 2) * ratio, top + 9 * ratio);
      }
    }
    pen.restore();
  }

  // What hardly changes is drawn as that.
  const around = (plot, least, most) => [Math.max(0, least - 0.05 * most), 1.05 * most];

  function options(chart, marks, width) {
    const axis = { stroke: drawing.colour("soft"), grid: { stroke: drawing.colour("line"), width: 1 }, ticks: { show: false } };
    const short = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });
    const said = (plot, value) => (value === null || value === undefined ? "–" : drawing.digits(value));
    return {
      width, height: 190, scales: { x: { time: false }, y: chart.notes ? { range: around } : {} },
      axes: [{ ...axis, size: 30, ...(chart.x ? {} : { incrs: WHOLE }) }, { ...axis, size: 62, values: (plot, values) => values.map(short) }],
      series: [
        { label: chart.x || "step", value: (plot, value) => (value === null || value === undefined ? "–" : value.toLocaleString("en")) },
        ...chart.lines.map((line, index) => ({
          label: line.name, value: chart.notes ? (plot, value, _, i) => noted(chart, value, i) : said, width: 1.5, dash: DASHES[index], spanGaps: true,
          stroke: drawing.colour(index ? "exposed" : "accent"), points: { show: chart.steps.length < 60, size: 4 },
        })),
      ],
      hooks: { draw: [(plot) => mark(plot, marks)] },
    };
  }

  // A value, and what happened then.
  function noted(chart, value, i) {
    return value === null || value === undefined || !chart.notes[i] ? "–" : `${drawing.digits(value)}, ${chart.notes[i]}`;
  }

  function describe(chart) {
    const ends = chart.lines.map((line) => {
      const values = line.values.filter((value) => value !== null);
      return `${line.name} from ${drawing.digits(values[0])} to ${drawing.digits(values[values.length - 1])}`;
    });
    const along = chart.x || "steps";
    return `${chart.title}, ${along} ${chart.steps[0]} to ${chart.steps[chart.steps.length - 1]}: ${ends.join(", ")}`;
  }

  function draw() {
    drawn.forEach((plot) => plot.destroy());
    drawn = places.map((place) => {
      const { charts, marks } = sources.get(place.dataset.from), chart = charts[Number(place.dataset.chart)];
      place.setAttribute("role", "img");
      place.setAttribute("aria-label", describe(chart));
      const values = [chart.steps, ...chart.lines.map((line) => line.values)];
      return new uPlot(options(chart, marks, place.clientWidth), values, place);
    });
  }

  function resize() {
    drawn.forEach((plot) => plot.setSize({ width: plot.root.parentElement.clientWidth, height: 190 }));
  }

  draw();
  addEventListener("resize", resize);
  drawing.onChange(draw);
  return { data: sources.get("charts"), memory: sources.get("memory-chart"), plots: () => drawn };
})();
