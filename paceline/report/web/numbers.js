"use strict";
// A step of two ranks in numbers: a table of what each holds at a moment, and what has just come to it or changed.
const numbers = (() => {
  const source = document.getElementById("numbers-data");
  if (!source) return null;
  const data = JSON.parse(source.textContent);
  const place = document.getElementById("numbers-held"), picker = document.getElementById("numbers-way");
  const frames = () => data.ways[Number(picker.value)];

  function element(name, text, more = {}) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(more)) made.setAttribute(key, value);
    return made;
  }

  // Four places after the point, as the example is worked by hand; gradients with three.
  const said = (value, what) => (value === null ? "–" : value.toFixed(what === "parameters" ? 4 : 3));

  function show(index) {
    const frame = frames()[index], before = frames()[Math.max(0, index - 1)];
    const table = element("table"), head = element("tr"), body = element("tbody");
    table.append(element("caption", `What each rank holds (${picker.selectedOptions[0].text}); – is what it does not hold, and what has just changed is in a frame`));
    head.append(element("th", "", { scope: "col" }), ...data.names[Number(picker.value)].map((name) => element("th", name, { scope: "col" })));
    frame.held.forEach((held, rank) => {
      for (const [what, values] of Object.entries(held)) {
        const row = element("tr");
        row.append(element("th", `rank ${rank}: ${what}`, { scope: "row" }));
        values.forEach((value, i) => {
          const cell = element("td", said(value, what));
          if (value !== before.held[rank][what][i]) cell.className = "changed";
          row.append(cell);
        });
        body.append(row);
      }
    });
    const top = element("thead");
    top.append(head);
    table.append(top, body);
    place.replaceChildren(table);
    return frame.told;
  }

  const player = players.player("numbers", () => frames().length, show);
  picker.addEventListener("change", () => player.go(0));
  return { data, player };
})();
