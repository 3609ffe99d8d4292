// What a report does when it is used: point at something for its value, click a name to hide it,
// click a heading to sort. Without this script everything is shown and nothing moves.
"use strict";

const all = (selector, root = document) => [...root.querySelectorAll(selector)];

// Values on hover: of what lies under the pointer, or of the nearest point of a chart.

const REACH = 28; // pixels
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);

function distance(element, event) {
  const box = element.getBoundingClientRect();
  return Math.hypot(box.x + box.width / 2 - event.clientX, box.y + box.height / 2 - event.clientY);
}

function pointedAt(event) {
  const under = event.target.closest("[data-tip]");
  const chart = event.target.closest("svg");
  if (under || !chart) return under;
  let nearest = null;
  for (const point of all("circle:not(.off)", chart)) {
    const away = distance(point, event);
    if (away < (nearest ? nearest.away : REACH)) nearest = { point, away };
  }
  return nearest && nearest.point;
}

function showTip(event) {
  const element = pointedAt(event);
  tip.hidden = !element;
  if (!element) return;
  tip.textContent = element.dataset.tip;
  const right = window.innerWidth - tip.offsetWidth - 4;
  const below = event.clientY + 16;
  const fits = below + tip.offsetHeight < window.innerHeight;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, right))}px`;
  tip.style.top = `${fits ? below : event.clientY - tip.offsetHeight - 10}px`;
}

document.addEventListener("pointermove", showTip);
document.addEventListener("pointerdown", showTip);
document.addEventListener("scroll", () => { tip.hidden = true; }, true);

// Hiding: a button names what it hides, wherever it is on the page.

const hidden = new Set();

function toggle(name) {
  if (!hidden.delete(name)) hidden.add(name);
  for (const element of all("[data-series]")) {
    element.classList.toggle("off", hidden.has(element.dataset.series));
  }
  for (const button of all("[data-toggle]")) {
    button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.toggle)));
  }
  all(".bars").forEach(rescale);
}

function seconds(value) {
  return value >= 1 ? `${value.toFixed(2)} s` : `${(1000 * value).toPrecision(3)} ms`;
}

// The longest bar that is shown takes all the room; where parts are hidden, a bar is their rest.
function rescale(bars) {
  const isPartial = all("[data-toggle^='part:'][aria-pressed='false']", bars).length > 0;
  let largest = 0;
  for (const track of all(".track", bars)) {
    const rest = all(".part:not(.off)", track).reduce((sum, part) => sum + Number(part.dataset.value), 0);
    const told = track.nextElementSibling.querySelector("b");
    told.dataset.whole ??= told.textContent;
    told.textContent = isPartial && track.querySelector(".part") ? seconds(rest) : told.dataset.whole;
    if (track.classList.contains("off")) continue;
    largest = Math.max(largest, rest, isPartial ? 0 : Number(track.dataset.high));
  }
  bars.classList.toggle("partial", isPartial);
  bars.style.setProperty("--largest", largest || 1);
}

for (const button of all("[data-toggle]")) {
  button.addEventListener("click", () => toggle(button.dataset.toggle));
}

// Sorting: the smallest first, then the largest first; rows without a value stay at the end.

function sort(heading) {
  const body = heading.closest("table").tBodies[0];
  const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const value = (row) => Number(row.cells[heading.cellIndex]?.dataset.value ?? NaN);
  const rows = [...body.rows].sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    return Number.isNaN(a) - Number.isNaN(b) || sign * (a - b) || 0;
  });
  for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  body.append(...rows);
}

for (const button of all(".sort")) {
  button.addEventListener("click", () => sort(button.closest("th")));
}

// Dark or light: as the system says, until somebody chooses.

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.style.colorScheme
    ? root.style.colorScheme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.style.colorScheme = isDark ? "light" : "dark";
});
