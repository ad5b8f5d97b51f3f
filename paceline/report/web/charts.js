"use strict";
// Figures over the steps, as uPlot draws them; restarts, skipped steps and checkpoints as vertical lines with a letter.
const charts = (() => {
  const source = document.getElementById("charts");
  if (!source) return [];
  const data = JSON.parse(source.textContent);
  const DASHES = [[], [6, 4]], MARKS = { restart: ["R", [2, 3]], skipped: ["S", [8, 3]], checkpoint: ["C", [1, 5]] };
  let drawn = [];

  function mark(plot) {
    const pen = plot.ctx, { left, top, width, height } = plot.bbox, ratio = window.devicePixelRatio || 1;
    pen.save();
    pen.strokeStyle = pen.fillStyle = drawing.colour("soft");
    pen.lineWidth = ratio;
    pen.font = `${10 * ratio}px system-ui, sans-serif`;
    for (const [name, [letter, dash]] of Object.entries(MARKS)) {
      pen.setLineDash(dash.map((long) => long * ratio));
      for (const step of data.marks[name]) {
        const at = plot.valToPos(step, "x", true);
        if (at < left || at > left + width) continue;
        pen.beginPath();
        pen.moveTo(at, top);
        pen.lineTo(at, top + height);
        pen.stroke();
        pen.fillText(letter, at + 2 * ratio, top + 9 * ratio);
      }
    }
    pen.restore();
  }

  function options(chart, width) {
    const axis = { stroke: drawing.colour("soft"), grid: { stroke: drawing.colour("line"), width: 1 }, ticks: { show: false } };
    const short = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });
    const said = (plot, value) => (value === null || value === undefined ? "–" : drawing.digits(value));
    return {
      width, height: 190, scales: { x: { time: false } },
      axes: [{ ...axis, size: 30 }, { ...axis, size: 62, values: (plot, values) => values.map(short) }],
      series: [
        { label: "step", value: (plot, value) => (value === null || value === undefined ? "–" : value.toLocaleString("en")) },
        ...chart.lines.map((line, index) => ({
          label: line.name, value: said, width: 1.5, dash: DASHES[index], spanGaps: true,
          stroke: drawing.colour(index ? "exposed" : "accent"), points: { show: chart.steps.length < 60, size: 4 },
        })),
      ],
      hooks: { draw: [mark] },
    };
  }

  function describe(chart) {
    const ends = chart.lines.map((line) => {
      const values = line.values.filter((value) => value !== null);
      return `${line.name} from ${drawing.digits(values[0])} to ${drawing.digits(values[values.length - 1])}`;
    });
    return `${chart.title}, steps ${chart.steps[0]} to ${chart.steps[chart.steps.length - 1]}: ${ends.join(", ")}`;
  }

  function draw() {
    drawn.forEach((plot) => plot.destroy());
    drawn = [...document.querySelectorAll(".chart")].map((place) => {
      const chart = data.charts[Number(place.dataset.chart)];
      place.setAttribute("role", "img");
      place.setAttribute("aria-label", describe(chart));
      const values = [chart.steps, ...chart.lines.map((line) => line.values)];
      return new uPlot(options(chart, place.clientWidth), values, place);
    });
  }

  function resize() {
    drawn.forEach((plot) => plot.setSize({ width: plot.root.parentElement.clientWidth, height: 190 }));
  }

  draw();
  addEventListener("resize", resize);
  drawing.onChange(draw);
  return { data, plots: () => drawn };
})();
