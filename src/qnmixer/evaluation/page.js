"use strict";

const settings = JSON.parse(byId("settings").textContent);
const { slices } = settings;
const presets = [
  ["overview", levelAndWidth(...settings.window)],
  ["soft tissue", [40, 400]],
  ["lung", [-600, 1500]],
  ["bone", [400, 1800]],
  ["full range", null], // of the shown slice
];
const SMALLEST_REGION = 8; // pixels

// What is shown. An iterate of Infinity is the last one. region and pinned may be null.
let state = {
  slice: 0, iterate: Infinity, preset: 0, level: presets[0][1][0], width: presets[0][1][1],
  errorLimit: settings.errorLimit, show: "both",
  region: null, // [column, row, width] in pixels; every region has the shape of the slice
  pinned: null, // [column, row] whose value stays on show
};
let hovered = null; // [column, row] under the mouse
let pixels = null; // of the shown slice: Int16Array [N, H, W], HU
let panels = []; // {method, figure, …}, truth first

function byId(id) { return document.getElementById(id); }
function clamp(value, low, high) { return Math.min(Math.max(value, low), high); }
function levelAndWidth(lower, upper) { return [(lower + upper) / 2, upper - lower]; }
function slice() { return slices[state.slice]; }
function lastIterate() { return Math.max(...slice().methods.map((method) => method.n)) - 1; }
function region() {
  const { width, height } = slice(), [x, y, w] = state.region ?? [0, 0, width];
  return { x, y, w, h: Math.max(1, Math.round((w * height) / width)) };
}

// ---- unpacking ----

async function unpack(n) {
  const text = atob(byId(`pixels-${n}`).textContent);
  const bytes = new Uint8Array(text.length);
  for (let k = 0; k < bytes.length; k++) bytes[k] = text.charCodeAt(k);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const images = new Int16Array(await new Response(stream).arrayBuffer());
  const size = slices[n].width * slices[n].height;
  for (let k = size; k < images.length; k++) images[k] += images[k - size]; // images are stored as differences
  return images;
}

async function openSlice() {
  const n = state.slice;
  pixels = null;
  const images = await unpack(n);
  if (n !== state.slice) return; // the user has chosen another slice meanwhile
  pixels = images;
  buildPanels();
  applyPreset();
  draw();
}

function imageNumber(number) { // the truth is number 0
  const size = slice().width * slice().height;
  return pixels.subarray(number * size, (number + 1) * size);
}

// ---- panels ----

function buildPanels() {
  let first = 0; // number of the first image of a method
  panels = [{ name: "truth", caption: "", n: 1, truth: true }, ...slice().methods].map((its) => {
    const method = { ...its, first };
    first += its.n;
    const figure = byId("panel").content.firstElementChild.cloneNode(true);
    const part = (selector) => figure.querySelector(selector);
    part(".name").textContent = method.name;
    return {
      method, figure, caption: part(".caption"), shown: part(".shown"), value: part(".value"),
      imageFrame: part(".image"), errorFrame: part(".error"),
    };
  });
  byId("panels").replaceChildren(...panels.map((panel) => panel.figure));
}

function subscript(number) { return [...String(number)].map((digit) => "₀₁₂₃₄₅₆₇₈₉"[digit]).join(""); }
function iterateOf(method) { return Math.min(state.iterate, method.n - 1); }
function imageOf(method) { return imageNumber(method.first + iterateOf(method)); }

// ---- drawing ----

let waiting = false;
function draw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    if (pixels) drawNow();
  });
}

function drawNow() {
  showControls();
  const greys = greyOfHu(), colours = colourOfError();
  const reference = imageNumber(0);
  for (const panel of panels) {
    const { method } = panel, hu = imageOf(method);
    const last = method.n - 1, t = iterateOf(method), name = last ? `x${subscript(t)}` : "";
    const errors = !method.truth;
    const grey = (k) => greys[hu[k] + 32768];
    const colour = (k) => (
      hu[k] === settings.notANumber || reference[k] === settings.notANumber
        ? MAGENTA : colours[Math.abs(hu[k] - reference[k])]);
    panel.imageFrame.hidden = state.show === "errors" && errors;
    panel.errorFrame.hidden = state.show === "images" || !errors;
    if (!panel.imageFrame.hidden) paint(panel.imageFrame, grey);
    if (!panel.errorFrame.hidden) paint(panel.errorFrame, colour);
    panel.caption.textContent = (t < last && method.caption ? `x${subscript(last)}: ` : "") + method.caption;
    const rmse = errors ? `RMSE ${rootMeanSquare(hu, reference)} HU` : "";
    panel.shown.textContent = [name, rmse].filter(Boolean).join(" · ");
    label(panel.imageFrame, `${method.name} ${name} of slice ${slice().name}, HU`);
    label(panel.errorFrame, `Error of ${method.name} ${name} of slice ${slice().name}, HU`);
  }
  showPlace();
}

const MAGENTA = 0xffff00ff; // bytes red, green, blue, opaque from the lowest

function greyOfHu() {
  const table = new Uint32Array(65536), lower = state.level - state.width / 2;
  for (let k = 0; k < 65536; k++) {
    const grey = Math.floor(255 * clamp((k - 32768 - lower) / state.width, 0, 1) + 0.5);
    table[k] = 0xff000000 + grey * 0x010101;
  }
  table[settings.notANumber + 32768] = MAGENTA;
  return table;
}

function colourOfError() {
  const table = new Uint32Array(65536);
  for (let k = 0; k < 65536; k++) {
    const [r, g, b] = settings.errorColours[Math.floor(255 * Math.min(k / state.errorLimit, 1) + 0.5)];
    table[k] = 0xff000000 + b * 0x10000 + g * 0x100 + r;
  }
  return table;
}

function paint(frame, colour) {
  const canvas = frame.firstElementChild, { x, y, w, h } = region();
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
  const picture = new ImageData(w, h), out = new Uint32Array(picture.data.buffer);
  for (let row = 0, k = 0; row < h; row++) {
    for (let i = (y + row) * slice().width + x, end = i + w; i < end; i++) out[k++] = colour(i);
  }
  canvas.getContext("2d", { willReadFrequently: true }).putImageData(picture, 0, 0); // in memory, without a GPU
}

function rootMeanSquare(hu, reference) {
  const { x, y, w, h } = region();
  let sum = 0;
  for (let row = y; row < y + h; row++) {
    for (let i = row * slice().width + x, end = i + w; i < end; i++) {
      if (hu[i] === settings.notANumber || reference[i] === settings.notANumber) return "–";
      sum += (hu[i] - reference[i]) ** 2;
    }
  }
  return Math.sqrt(sum / (w * h)).toFixed(1);
}

function label(frame, text) { frame.firstElementChild.setAttribute("aria-label", text); }

function showPlace() {
  const place = state.pinned ?? hovered, { x, y, w, h } = region();
  const inside = place && place[0] >= x && place[0] < x + w && place[1] >= y && place[1] < y + h;
  const box = byId("panels");
  box.classList.toggle("placed", Boolean(inside));
  box.classList.toggle("zoomed", state.region !== null);
  byId("where").textContent = place ? `column ${place[0]}, row ${place[1]}${state.pinned ? " (kept)" : ""}` : "";
  const at = place ? place[1] * slice().width + place[0] : 0;
  const reference = imageNumber(0)[at];
  for (const { method, value } of panels) {
    const hu = imageOf(method)[at];
    const known = hu !== settings.notANumber && reference !== settings.notANumber;
    const error = method.truth || !known ? "" : ` (${signed(hu - reference)})`;
    value.textContent = place ? (hu === settings.notANumber ? "not a number" : `${minus(hu)} HU${error}`) : "";
  }
  if (!inside) return;
  box.style.setProperty("--x", `${(100 * (place[0] - x + 0.5)) / w}%`);
  box.style.setProperty("--y", `${(100 * (place[1] - y + 0.5)) / h}%`);
  box.style.setProperty("--pixel", `${100 / w}%`);
}

function minus(number) { return String(number).replace("-", "−"); }
function signed(number) { return (number > 0 ? "+" : "") + minus(number); }

// ---- controls ----

function showControls() {
  const last = lastIterate(), t = Math.min(state.iterate, last);
  byId("slice").value = state.slice;
  byId("iterate-label").hidden = last === 0;
  byId("iterate").max = last;
  byId("iterate").value = t;
  byId("iterate-text").textContent = `x${subscript(t)} of x${subscript(last)}`;
  byId("preset").value = state.preset;
  setInput("level", state.level);
  setInput("width", state.width);
  setInput("error-limit", state.errorLimit);
  byId("lower").textContent = minus(state.level - state.width / 2);
  byId("upper").textContent = minus(state.level + state.width / 2);
  byId("error-upper").textContent = state.errorLimit;
  byId("whole").disabled = state.region === null;
}

function setInput(id, value) {
  if (document.activeElement !== byId(id) || Number(byId(id).value) !== value) byId(id).value = value;
}

function applyPreset() {
  if (state.preset < 0) return; // keep the given level and width
  [state.level, state.width] = presets[state.preset][1] ?? fullRange();
}

function fullRange() {
  const known = imageNumber(0).filter((hu) => hu !== settings.notANumber);
  const low = known.reduce((a, b) => Math.min(a, b), 32767), high = known.reduce((a, b) => Math.max(a, b), -32767);
  return levelAndWidth(Math.min(low, high), Math.max(high, low + 1));
}

function choose(change) {
  const before = slice();
  state = { ...state, ...change };
  if (slice() !== before) {
    hovered = null;
    if (before.width !== slice().width || before.height !== slice().height) {
      state = { ...state, region: null, pinned: null };
    }
    openSlice();
  } else if (pixels) {
    applyPreset();
    draw();
  }
}

function chooseIterate(t) { choose({ iterate: clamp(t, 0, lastIterate()) }); }
function chooseSlice(n) { choose({ slice: clamp(n, 0, slices.length - 1) }); }

byId("slice").addEventListener("change", (event) => chooseSlice(Number(event.target.value)));
byId("iterate").addEventListener("input", (event) => chooseIterate(Number(event.target.value)));
byId("preset").addEventListener("change", (event) => choose({ preset: Number(event.target.value) }));
byId("show").addEventListener("change", (event) => choose({ show: event.target.value }));
byId("whole").addEventListener("click", () => choose({ region: null }));
for (const [id, key] of [["level", "level"], ["width", "width"], ["error-limit", "errorLimit"]]) {
  byId(id).addEventListener("input", (event) => {
    const value = event.target.valueAsNumber;
    if (!Number.isFinite(value) || (key !== "level" && value <= 0)) return; // the user is still typing
    choose(key === "errorLimit" ? { errorLimit: value } : { preset: -1, [key]: value });
  });
}

byId("panels").addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!steps) return;
  if (steps[0]) chooseIterate(Math.min(state.iterate, lastIterate()) + steps[0]);
  else chooseSlice(state.slice + steps[1]);
  event.preventDefault();
});

// ---- mouse and touch ----

let drag = null; // {frame, from: [column, row], client: [x, y], moved}

function placeIn(frame, event) { // columns and rows, with fractions
  const { left, top, width, height } = frame.getBoundingClientRect(), { x, y, w, h } = region();
  return [x + ((event.clientX - left) / width) * w, y + ((event.clientY - top) / height) * h];
}

function pixelAt([x, y]) {
  return [clamp(Math.floor(x), 0, slice().width - 1), clamp(Math.floor(y), 0, slice().height - 1)];
}

byId("panels").addEventListener("pointerdown", (event) => {
  const frame = event.target.closest(".frame");
  if (!frame || event.button !== 0) return;
  drag = { frame, from: placeIn(frame, event), client: [event.clientX, event.clientY], moved: false };
  frame.setPointerCapture(event.pointerId);
});

byId("panels").addEventListener("pointermove", (event) => {
  const frame = drag ? drag.frame : event.target.closest(".frame");
  hovered = frame ? pixelAt(placeIn(frame, event)) : null;
  if (drag && Math.hypot(event.clientX - drag.client[0], event.clientY - drag.client[1]) > 4) drag.moved = true;
  if (drag?.moved) showBox(...selection(event));
  if (pixels) showPlace();
});

function selection(event) { // from the start of the drag to the mouse, in the shape of the slice
  const [x0, y0] = drag.from, [x1, y1] = placeIn(drag.frame, event), { width, height } = slice();
  const w = Math.max(Math.abs(x1 - x0), (Math.abs(y1 - y0) * width) / height);
  return [x1 < x0 ? x0 - w : x0, y1 < y0 ? y0 - (w * height) / width : y0, w];
}

function showBox(left, top, size) {
  const { style } = byId("panels"), { x, y, w, h } = region();
  byId("panels").classList.add("selecting");
  style.setProperty("--box-x", `${(100 * (left - x)) / w}%`);
  style.setProperty("--box-y", `${(100 * (top - y)) / h}%`);
  style.setProperty("--box-size", `${(100 * size) / w}%`);
}

function chooseRegion(x, y, w) {
  const { width, height } = slice();
  w = Math.round(clamp(w, Math.min(SMALLEST_REGION, width), width));
  const h = Math.max(1, Math.round((w * height) / width));
  const at = [clamp(Math.round(x), 0, width - w), clamp(Math.round(y), 0, height - h)];
  choose({ region: w === width ? null : [...at, w] });
}

byId("panels").addEventListener("pointerup", (event) => {
  if (!drag) return;
  if (drag.moved) chooseRegion(...selection(event));
  else choose({ pinned: state.pinned ? null : pixelAt(drag.from) });
  endDrag();
});

function endDrag() {
  byId("panels").classList.remove("selecting");
  drag = null;
}

byId("panels").addEventListener("pointercancel", endDrag);

byId("panels").addEventListener("pointerleave", () => {
  hovered = null;
  if (pixels) showPlace();
});

byId("panels").addEventListener("dblclick", (event) => {
  if (event.target.closest(".frame")) choose({ region: null });
});

// ---- start ----

function fill(select, names) {
  select.replaceChildren(...names.map(([text, value]) => new Option(text, value)));
}

function start() {
  if (slices.length === 0) return;
  if (typeof DecompressionStream === "undefined") {
    byId("message").textContent = "This browser cannot unpack the slices (it has no DecompressionStream): use Chrome 80, " +
      "Firefox 113, Safari 16.4, or a newer version.";
    byId("message").hidden = false;
    return;
  }
  byId("viewer").hidden = false;
  const captionOf = ({ methods }) => methods.at(-1).caption;
  fill(byId("slice"), slices.map((it, n) => [[n + 1, it.name, captionOf(it)].filter(Boolean).join(" · "), n]));
  fill(byId("preset"), [...presets.map(([name], n) => [name, n]), ["own", -1]]);
  const scale = new ImageData(256, 1);
  settings.errorColours.forEach((colour, k) => scale.data.set([...colour, 255], 4 * k));
  byId("error-scale").getContext("2d").putImageData(scale, 0, 0);
  openSlice();
}

start();
