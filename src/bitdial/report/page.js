"use strict";
// Tooltips and the keyboard for the points of figures, and the dial. All text goes in as text.
(() => {
  function make(tag, parent, text, name) {
    const element = document.createElement(tag);
    element.textContent = text;
    element.className = name;
    parent.append(element);
    return element;
  }

  // --- points: one stop of the Tab key for each figure, arrow keys within it -----------------------
  const tip = make("div", document.body, "", "tip");
  tip.setAttribute("role", "tooltip");
  tip.hidden = true;

  function tell(point) {
    tip.textContent = point.getAttribute("aria-label");
    tip.hidden = false;
    tip.style.left = "0";
    const place = (point.querySelector(".mark") || point).getBoundingClientRect();
    const box = tip.getBoundingClientRect();
    const wide = document.documentElement.clientWidth;
    const left = Math.min(Math.max(place.left + place.width / 2 - box.width / 2, 8), wide - box.width - 8);
    const above = place.top - box.height - 8;
    tip.style.left = `${left + scrollX}px`;
    tip.style.top = `${(above < 0 ? place.bottom + 8 : above) + scrollY}px`;
  }

  function hide() {
    tip.hidden = true;
  }

  function walk(event, points) {
    const place = points.indexOf(event.currentTarget);
    const steps = { ArrowRight: place + 1, ArrowDown: place + 1, ArrowLeft: place - 1, ArrowUp: place - 1 };
    const next = points[{ ...steps, Home: 0, End: points.length - 1 }[event.key]];
    if (event.key === "Escape") hide();
    if (!next) return;
    event.preventDefault();
    event.currentTarget.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }

  for (const plot of document.querySelectorAll(".plot")) {
    const points = [...plot.querySelectorAll(".point")];
    points.forEach((point, place) => {
      const title = point.querySelector("title"); // the browser's own tooltip, where no script runs
      point.setAttribute("aria-label", title.textContent);
      point.setAttribute("role", point.dataset.setting ? "button" : "img");
      point.setAttribute("tabindex", place ? "-1" : "0");
      title.remove();
      point.addEventListener("pointerenter", () => tell(point));
      point.addEventListener("pointerleave", hide);
      point.addEventListener("focus", () => tell(point));
      point.addEventListener("blur", hide);
      point.addEventListener("keydown", (event) => walk(event, points));
    });
  }

  // --- the dial -----------------------------------------------------------------------------------
  const content = document.getElementById("dial-data");
  if (!content) return;
  const data = JSON.parse(content.textContent);
  const range = document.getElementById("dial-range");
  const list = document.getElementById("dial-bars");
  const cells = [...document.querySelectorAll("#dial-facts .now")];
  const spot = document.getElementById("dial-spot");
  const span = document.getElementById("dial-span");
  const marks = [...document.querySelectorAll(".point[data-setting]")];
  const rows = data.layers.map((layer) => {
    const row = make("li", list, "", "");
    make("span", row, layer, "layer");
    const bar = make("span", make("span", row, "", "track"), "", "bar");
    return [bar, make("span", row, "", "bits")];
  });

  function turn(number) {
    const setting = data.settings[number];
    range.value = String(number);
    range.setAttribute("aria-valuetext", setting.title);
    document.getElementById("dial-name").textContent = setting.name;
    document.getElementById("dial-code").textContent = setting.code;
    cells.forEach((cell, place) => (cell.textContent = setting.facts[place]));
    rows.forEach(([bar, label], place) => {
      const [bits, text] = setting.layers[place];
      bar.style.width = `${(100 * bits) / data.most}%`;
      bar.className = `bar w${bits}`;
      label.textContent = text;
    });
    const [low, middle, high] = setting.at;
    spot.setAttribute("x", `${middle}%`);
    span.setAttribute("x1", `${low}%`);
    span.setAttribute("x2", `${high}%`);
    for (const mark of marks) mark.classList.toggle("chosen", mark.dataset.setting === String(number));
  }

  range.addEventListener("input", () => turn(Number(range.value)));
  for (const mark of marks) {
    const choose = () => turn(Number(mark.dataset.setting));
    mark.addEventListener("click", choose);
    mark.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      choose();
    });
  }
  document.getElementById("dial").hidden = false;
  turn(data.chosen);
})();
