"use strict";
// What both kinds of picture need: colours as the style sheet has them, quantities in words, and when to draw again.
const drawing = (() => {
  const redrawn = [];

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  }

  function digits(value) {
    if (value === 0) return "0";
    const places = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
    return places > 6 ? value.toExponential(2) : value.toLocaleString("en", {
      minimumFractionDigits: places, maximumFractionDigits: places,
    });
  }

  function withUnit(value, units) {
    const [size, name] = units.find(([unit]) => Math.abs(value) >= unit) || units[units.length - 1];
    return digits(value / size) + " " + name;
  }

  const microseconds = (value) => withUnit(value, [[1e6, "s"], [1e3, "ms"], [1, "µs"]]);
  const bytes = (value) => withUnit(value, [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]);

  const rate = (value) => withUnit(value, [[1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"], [1, "B/s"]]);

  // Stripes of what a rank stands still for, which are told from the rest without colour.
  function stripes(context) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const pen = tile.getContext("2d");
    pen.fillStyle = colour("exposed");
    pen.fillRect(0, 0, 6, 6);
    pen.strokeStyle = colour("page");
    pen.lineWidth = 1.2;
    for (const shift of [-6, 0, 6]) { pen.beginPath(); pen.moveTo(shift, 6); pen.lineTo(shift + 6, 0); pen.stroke(); }
    return context.createPattern(tile, "repeat");
  }

  // What an op is drawn as.
  const kind = (name, computes) => (!computes ? "hidden" : ["forward", "backward", "update"].includes(name) ? name : "other");

  // The colours of paper are not those of a dark screen.
  const again = () => redrawn.forEach((draw) => draw());
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", again);

  return { colour, digits, microseconds, bytes, rate, stripes, kind, onChange: (draw) => redrawn.push(draw) };
})();
