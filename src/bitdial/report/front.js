"use strict";
// Choosing a plan, in the list or by its mark in the figure, shows what it is made of. All text goes in as text.
(() => {
  const data = JSON.parse(document.getElementById("front-data").textContent);
  const list = document.getElementById("front-list");
  const facts = document.getElementById("front-facts");
  const bars = document.getElementById("front-bars");
  const marks = data.plans.map((_, number) => document.getElementById(`front-plan-${number}`));
  const ring = document.createElementNS("http://www.w3.org/2000/svg", "circle");

  function make(tag, parent, text, name) {
    const element = document.createElement(tag);
    element.textContent = text;
    element.className = name;
    parent.append(element);
    return element;
  }

  function show(number) {
    const plan = data.plans[number];
    list.value = String(number);
    facts.replaceChildren();
    for (const [name, value] of plan.facts) {
      make("dt", facts, name, "");
      make("dd", facts, value, "");
    }
    document.getElementById("front-code").textContent = plan.code;
    bars.replaceChildren();
    plan.layers.forEach(([bits, label], place) => {
      const row = make("li", bars, "", "");
      make("span", row, data.layers[place], "layer");
      const bar = make("span", make("span", row, "", "track"), "", "bar");
      bar.style.width = `${(100 * bits) / data.most}%`;
      bar.style.backgroundColor = data.colours[bits];
      make("span", row, label, "bits");
    });
    const mark = marks[number].querySelector("use");
    ring.setAttribute("cx", mark.getAttribute("x"));
    ring.setAttribute("cy", mark.getAttribute("y"));
    marks[number].append(ring);
  }

  data.plans.forEach((plan, number) => {
    const option = make("option", list, plan.title, "");
    option.value = String(number);
    marks[number].addEventListener("click", () => show(number));
    marks[number].classList.add("mark");
  });
  list.addEventListener("change", () => show(Number(list.value)));
  ring.setAttribute("r", "9");
  ring.setAttribute("class", "ring");
  document.getElementById("front-choice").hidden = false;
  show(data.chosen);
})();
