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
const CACHED_SLICES = 4; // slices that stay unpacked: 14 MB each at 256 x 256, 7 methods, 15 iterates

// What is shown. The address has it too. An iterate of Infinity is the last one. region and pinned may be null.
const initial = {
  slice: settings.opened, iterate: Infinity, preset: 0, level: presets[0][1][0], width: presets[0][1][1],
  errorLimit: settings.errorLimit, show: "both",
  region: null, // [column, row, width] in pixels; every region has the shape of the slice
  pinned: null, // [column, row] whose value stays on show
};
let state = { ...initial };
let hovered = null; // [column, row] under the mouse
let pixels = null; // of the shown slice: Int16Array [N, H, W], HU
const unpacked = new Map();
let panels = []; // {method, figure, …}, truth first

function byId(id) { return document.getElementById(id); }
function clamp(value, low, high) { return Math.min(Math.max(value, low), high); }
function levelAndWidth(lower, upper) { return [(lower + upper) / 2, upper - lower]; }
function slice() { return slices[state.slice]; }
function lastIterate() { return Math.max(...slice().methods.map((method) => method.iterates.length)) - 1; }
function wholeSlice() { return { x: 0, y: 0, w: slice().width, h: slice().height }; }
function region() {
  if (!state.region) return wholeSlice();
  const [x, y, w] = state.region;
  return { x, y, w, h: heightOf(w) };
}
function heightOf(w) { return Math.max(1, Math.round((w * slice().height) / slice().width)); }

// ---- unpacking ----

async function inflate(id) {
  const text = atob(byId(id).textContent);
  const bytes = new Uint8Array(text.length);
  for (let k = 0; k < bytes.length; k++) bytes[k] = text.charCodeAt(k);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function unpack(n) {
  if (unpacked.has(n)) return unpacked.get(n);
  const images = new Int16Array(await inflate(`pixels-${n}`));
  const size = slices[n].width * slices[n].height;
  for (let k = size; k < images.length; k++) images[k] += images[k - size]; // images are stored as differences
  if (unpacked.size >= CACHED_SLICES) unpacked.delete(unpacked.keys().next().value);
  unpacked.set(n, images);
  return images;
}

async function openSlice() {
  const n = state.slice;
  pixels = null;
  showControls();
  const images = await unpack(n);
  if (n !== state.slice) return; // the user has chosen another slice meanwhile
  pixels = images;
  buildPanels();
  applyPreset();
  draw();
}

function say(text) {
  byId("message").textContent = text;
  byId("message").hidden = false;
}

function image(number) {
  const size = slice().width * slice().height;
  return pixels.subarray(number * size, (number + 1) * size);
}

// ---- thumbnails ----

async function showThumbnails() {
  const greys = new Uint8Array(await inflate("thumbnail-pixels"));
  let at = 0;
  byId("thumbnails").replaceChildren(...slices.map(({ name, psnr, thumbnail: [h, w] }, n) => {
    const button = document.createElement("button"), canvas = document.createElement("canvas");
    const picture = new ImageData(w, h), out = new Uint32Array(picture.data.buffer);
    for (let k = 0; k < w * h; k++) out[k] = 0xff000000 + greys[at++] * 0x010101;
    Object.assign(canvas, { width: w, height: h });
    canvas.getContext("2d", { willReadFrequently: true }).putImageData(picture, 0, 0);
    button.type = "button";
    button.title = psnr === null ? name : `${name}, ${psnr} dB`;
    button.setAttribute("aria-label", button.title);
    button.append(canvas, psnr === null ? n + 1 : `${psnr} dB`);
    button.addEventListener("click", () => chooseSlice(n));
    return button;
  }));
  markThumbnail();
}

function markThumbnail() {
  const buttons = byId("thumbnails").children, atFirst = !byId("thumbnails").querySelector("[aria-current]");
  for (const [n, button] of [...buttons].entries()) {
    button.tabIndex = n === state.slice ? 0 : -1; // the tab key stops once; arrow keys choose the next
    button.setAttribute("aria-current", n === state.slice);
  }
  const box = byId("thumbnails"), chosen = buttons[state.slice];
  if (atFirst || !chosen) return; // at first, the list shows its beginning
  box.scrollLeft = clamp(box.scrollLeft, chosen.offsetLeft + chosen.offsetWidth - box.clientWidth, chosen.offsetLeft);
  box.scrollTop = clamp(box.scrollTop, chosen.offsetTop + chosen.offsetHeight - box.clientHeight, chosen.offsetTop);
}

byId("thumbnails").addEventListener("keydown", (event) => {
  const to = { ArrowLeft: state.slice - 1, ArrowRight: state.slice + 1, Home: 0, End: slices.length - 1 }[event.key];
  if (to === undefined || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
  chooseSlice(to);
  byId("thumbnails").children[state.slice].focus({ preventScroll: true });
  event.preventDefault();
  event.stopPropagation(); // outside the list these keys choose iterates
});

// ---- panels ----

function buildPanels() {
  const { truth, methods } = slice();
  const shown = methods.map((method) => ({ ...method, truth: false }));
  shown.unshift({ name: "truth", caption: "", iterates: [truth], truth: true });
  panels = shown.map((method) => {
    const figure = byId("panel").content.firstElementChild.cloneNode(true);
    const part = (selector) => figure.querySelector(selector);
    part(".name").textContent = part(".name").title = method.name;
    return {
      method, figure, caption: part(".caption"), shown: part(".shown"), value: part(".value"),
      imageFrame: part(".image"), errorFrame: part(".error"), map: part(".map"),
    };
  });
  byId("panels").replaceChildren(...panels.map((panel) => panel.figure));
}

function subscript(number) { return [...String(number)].map((digit) => "₀₁₂₃₄₅₆₇₈₉"[digit]).join(""); }
function iterateOf(method) { return Math.min(state.iterate, method.iterates.length - 1); }
function numberOf(method) { return method.iterates[iterateOf(method)]; }

const GAP = 12; // between panels, and 4 between an image and its error map
const NARROWEST = 140; // width of a panel in pixels if the window is too small for all
const BESIDE = 1.2; // error maps go below their images only if these become this many times larger
const ROOM = 300; // pixels of height: with less room below the controls, the reader scrolls down to the images

// Place error maps beside their images or below them, with the number of columns that makes the images largest.
function lay() {
  const both = state.show === "both", { width, height } = slice();
  const box = byId("panels"), room = box.clientWidth, tall = heightLeft();
  let best = null;
  for (const beside of both ? [true, false] : [false]) {
    const units = panels.map((panel) => (beside && !panel.method.truth ? 2 : 1));
    const high = both && !beside ? 2 : 1, caption = (beside ? 48 : 106) + GAP;
    for (let columns = Math.max(...units); columns <= units.reduce((a, b) => a + b); columns++) {
      const rows = rowsOf(units, columns), widest = Math.floor((room - GAP * (columns - 1)) / columns);
      const highest = (shown) => Math.floor(((tall / shown - caption) / high) * (width / height));
      const fits = Math.min(widest, highest(rows)) >= NARROWEST;
      const panel = Math.min(widest, fits ? highest(rows) : Math.max(highest(1), NARROWEST));
      const found = { beside, rows, panel, fits, needed: rows * (caption + (high * panel * height) / width) };
      if (better(found, best)) best = found;
    }
  }
  box.classList.toggle("beside", best.beside);
  box.style.setProperty("--panel", `${best.panel}px`);
  return best.panel;
}

function better(found, best) { // the largest layout that fits into the window; if none fits, the one with the least scrolling
  if (best === null || found.fits !== best.fits) return best === null || found.fits;
  const small = found.panel < NARROWEST || best.panel < NARROWEST, bonus = best.beside && !found.beside ? BESIDE : 1;
  if (!found.fits && !small) return bonus * found.needed < best.needed;
  const fewerRows = found.beside === best.beside && found.rows < best.rows; // they use the width of the window
  return found.panel > (fewerRows ? 0.9 : bonus) * best.panel;
}

function rowsOf(units, columns) {
  let rows = 1, used = 0;
  for (const unit of units) {
    if (used + unit > columns) [rows, used] = [rows + 1, 0];
    used += unit;
  }
  return rows;
}

function heightLeft() { // below the controls; if that is too little, below the bar
  const above = byId("panels").getBoundingClientRect().top + scrollY;
  const bar = (document.querySelector(".bars").offsetHeight || document.querySelector(".bar").offsetHeight) + 8;
  return innerHeight - (innerHeight - above < ROOM ? bar : above);
}

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
  const width = lay();
  const greys = greyOfHu(), colours = colourOfError();
  const reference = image(slice().truth);
  for (const panel of panels) {
    const { method } = panel, hu = image(numberOf(method));
    const last = method.iterates.length - 1, t = iterateOf(method), name = last ? `x${subscript(t)}` : "";
    const errors = !method.truth;
    const grey = (k) => greys[hu[k] + 32768];
    const colour = (k) => (
      hu[k] === settings.notANumber || reference[k] === settings.notANumber
        ? MAGENTA : colours[Math.abs(hu[k] - reference[k])]);
    panel.imageFrame.hidden = state.show === "errors" && errors;
    panel.errorFrame.hidden = state.show === "images" || !errors;
    panel.map.hidden = state.show === "images" || !method.truth || state.region === null;
    if (!panel.imageFrame.hidden) paint(panel.imageFrame, width, grey, region());
    if (!panel.errorFrame.hidden) paint(panel.errorFrame, width, colour, region());
    if (!panel.map.hidden) paint(panel.map, width, grey, wholeSlice());
    panel.caption.textContent = panel.caption.title =
      (t < last && method.caption ? `x${subscript(last)}: ` : "") + method.caption;
    const behind = t === last && last > 0 && last < Math.min(state.iterate, lastIterate());
    const rmse = errors ? `RMSE ${rootMeanSquare(hu, reference)} HU` : "";
    panel.shown.textContent = [behind ? `${name}, its last` : name, rmse].filter(Boolean).join(" · ");
    label(panel.imageFrame, `${method.name} ${name} of slice ${slice().name}, HU`);
    label(panel.map, "Position of the region");
    label(panel.errorFrame, `Error of ${method.name} ${name} of slice ${slice().name}, HU`);
  }
  showHint();
  showPlace();
  writeAddress();
}

// Remarks on what may surprise a reader of these images.
function showHint() {
  const { truth, methods } = slice(), hints = [];
  const fbp = methods.find((method) => method.name === "FBP");
  for (const method of fbp ? methods : []) {
    const t = iterateOf(method), last = method.iterates.length - 1;
    const [its, other] = [method, fbp].map((of) => rootMeanSquare(image(numberOf(of)), image(truth)));
    if (t > 0 && t < last && Number(its) > Number(other)) {
      hints.push(`x${subscript(t)} of ${method.name} is worse than FBP (RMSE ${its} and ${other} HU): the loss of training ` +
        `uses x${subscript(last)} only, and earlier iterates are intermediate steps.`);
    }
  }
  byId("hint").textContent = hints.join(" ");
  byId("hint").hidden = hints.length === 0;
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

function paint(frame, width, colour, { x, y, w, h }) {
  const canvas = frame.firstElementChild;
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
  const picture = new ImageData(w, h), out = new Uint32Array(picture.data.buffer);
  for (let row = 0, k = 0; row < h; row++) {
    for (let i = (y + row) * slice().width + x, end = i + w; i < end; i++) out[k++] = colour(i);
  }
  canvas.getContext("2d", { willReadFrequently: true }).putImageData(picture, 0, 0); // in memory, without a GPU
  frame.classList.toggle("reduced", width * devicePixelRatio < w);
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
  if (state.region) showBox(x, y, w);
  byId("where").textContent = place ? `column ${place[0]}, row ${place[1]}${state.pinned ? " (kept)" : ""}` : "";
  const at = place ? place[1] * slice().width + place[0] : 0;
  const reference = image(slice().truth)[at];
  for (const { method, value } of panels) {
    const hu = image(numberOf(method))[at];
    const known = hu !== settings.notANumber && reference !== settings.notANumber;
    const error = method.truth || !known ? "" : ` (${signed(hu - reference)})`;
    value.textContent = place ? (hu === settings.notANumber ? "not a number" : `${minus(hu)} HU${error}`) : "";
  }
  if (!inside) return;
  box.style.setProperty("--x", `${(100 * (place[0] - x + 0.5)) / w}%`);
  box.style.setProperty("--y", `${(100 * (place[1] - y + 0.5)) / h}%`);
  box.style.setProperty("--pixel", `${100 / w}%`);
}

function showBox(x, y, w) {
  const { style } = byId("panels"), { width, height } = slice();
  style.setProperty("--box-x", `${(100 * x) / width}%`);
  style.setProperty("--box-y", `${(100 * y) / height}%`);
  style.setProperty("--box-size", `${(100 * w) / width}%`);
}

function minus(number) { return String(number).replace("-", "−"); }
function signed(number) { return (number > 0 ? "+" : "") + minus(number); }

// ---- controls ----

function showControls() {
  const last = lastIterate(), t = Math.min(state.iterate, last), { w } = region();
  byId("slice").value = state.slice;
  if (byId("thumbnails").children[state.slice]?.getAttribute("aria-current") === "false") markThumbnail();
  byId("iterate-label").hidden = last === 0;
  byId("iterate").max = last;
  byId("iterate").value = t;
  byId("iterate-text").textContent = `x${subscript(t)} of x${subscript(last)}`;
  byId("iterate").setAttribute("aria-valuetext", `x${t} of x${last}`);
  byId("preset").value = state.preset;
  setInput("level", state.level);
  setInput("width", state.width);
  setInput("error-limit", state.errorLimit);
  byId("show").value = state.show;
  byId("lower").textContent = minus(state.level - state.width / 2);
  byId("upper").textContent = minus(state.level + state.width / 2);
  byId("error-upper").textContent = state.errorLimit;
  byId("zoom").textContent = `${Number((slice().width / w).toFixed(1))}×`;
  byId("zoom-out").disabled = byId("whole").disabled = state.region === null;
  byId("zoom-in").disabled = w <= SMALLEST_REGION;
  byId("region").textContent = state.region ? `region: columns ${region().x}–${region().x + w - 1}, ` +
    `rows ${region().y}–${region().y + region().h - 1}` : "";
}

function setInput(id, value) {
  if (document.activeElement !== byId(id) || Number(byId(id).value) !== value) byId(id).value = value;
}

function applyPreset() {
  if (state.preset < 0) return; // keep the given level and width
  [state.level, state.width] = presets[state.preset][1] ?? fullRange();
}

function fullRange() {
  let low = 32767, high = -32767;
  for (const hu of image(slice().truth)) {
    if (hu === settings.notANumber) continue;
    if (hu < low) low = hu;
    if (hu > high) high = hu;
  }
  return levelAndWidth(Math.min(low, high), Math.max(high, low + 1));
}

function choose(change) {
  const before = slice();
  state = { ...state, ...change };
  if (slice() !== before) {
    hovered = null;
    if (before.width !== slice().width || before.height !== slice().height) {
      state = { ...state, region: null, pinned: null, ...change };
    }
    openSlice();
  } else if (pixels) {
    applyPreset();
    draw();
  }
}

function choosePreset(preset) { if (preset < presets.length) choose({ preset }); }
function chooseIterate(t) { choose({ iterate: clamp(t, 0, lastIterate()) }); }
function chooseSlice(n) { choose({ slice: clamp(n, 0, slices.length - 1) }); }

function chooseRegion(x, y, w) {
  const { width, height } = slice();
  w = Math.round(clamp(w, Math.min(SMALLEST_REGION, width), width));
  const h = heightOf(w);
  const at = [clamp(Math.round(x), 0, width - w), clamp(Math.round(y), 0, height - h)];
  choose({ region: w === width ? null : [...at, w] });
}

function zoom(factor, place = state.pinned) {
  const { x, y, w, h } = region();
  const [px, py] = place ?? [x + (w - 1) / 2, y + (h - 1) / 2];
  chooseRegion(px + 0.5 - w / factor / 2, py + 0.5 - h / factor / 2, w / factor);
}

byId("slice").addEventListener("change", (event) => chooseSlice(Number(event.target.value)));
byId("iterate").addEventListener("input", (event) => chooseIterate(Number(event.target.value)));
byId("preset").addEventListener("change", (event) => choose({ preset: Number(event.target.value) }));
byId("show").addEventListener("change", (event) => choose({ show: event.target.value }));
byId("zoom-in").addEventListener("click", () => zoom(2));
byId("zoom-out").addEventListener("click", () => zoom(1 / 2));
byId("whole").addEventListener("click", () => choose({ region: null }));
for (const [id, key] of [["level", "level"], ["width", "width"], ["error-limit", "errorLimit"]]) {
  byId(id).addEventListener("input", (event) => {
    const value = event.target.valueAsNumber;
    if (!Number.isFinite(value) || (key !== "level" && value <= 0)) return; // the user is still typing
    choose(key === "errorLimit" ? { errorLimit: value } : { preset: -1, [key]: value });
  });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || byId("viewer").hidden) return;
  if (event.target.matches("input, select, summary, .wide")) return; // these elements use the keys themselves
  const arrow = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  const inPanels = document.activeElement === byId("panels");
  if (arrow && event.shiftKey) movePlace(arrow);
  else if (arrow && arrow[0]) chooseIterate(Math.min(state.iterate, lastIterate()) + arrow[0]);
  else if (arrow && inPanels) chooseSlice(state.slice + arrow[1]);
  else if ("+=".includes(event.key)) zoom(2);
  else if (event.key === "-") zoom(1 / 2);
  else if (event.key === "0") choose({ region: null });
  else if (/^[1-9]$/.test(event.key)) choosePreset(Number(event.key) - 1);
  else if (event.key.toLowerCase() === "e") nextShow();
  else if (event.key === "Escape") choose(state.pinned ? { pinned: null } : { region: null });
  else return;
  event.preventDefault();
});

function nextShow() {
  const all = ["both", "images", "errors"];
  choose({ show: all[(all.indexOf(state.show) + 1) % all.length] });
}

function movePlace([dx, dy]) {
  const { width, height } = slice(), { x, y, w, h } = region();
  const [px, py] = state.pinned ?? hovered ?? [x + (w >> 1), y + (h >> 1)];
  choose({ pinned: [clamp(px + dx, 0, width - 1), clamp(py + dy, 0, height - 1)] });
}

// ---- mouse and touch ----

let drag = null; // {frame, from: [column, row], client: [x, y], region, moved}

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
  drag = {
    frame, from: placeIn(frame, event), client: [event.clientX, event.clientY], region: region(), moved: false,
    pans: state.region !== null, selects: state.region === null && event.pointerType !== "touch",
  };
  frame.setPointerCapture(event.pointerId);
});

byId("panels").addEventListener("pointermove", (event) => {
  const frame = drag ? drag.frame : event.target.closest(".frame");
  hovered = frame ? pixelAt(placeIn(frame, event)) : null;
  if (drag && Math.hypot(event.clientX - drag.client[0], event.clientY - drag.client[1]) > 4) drag.moved = true;
  if (drag?.moved && drag.pans) {
    const { width, height } = drag.frame.getBoundingClientRect(), { x, y, w, h } = drag.region;
    chooseRegion(
      x - ((event.clientX - drag.client[0]) / width) * w, y - ((event.clientY - drag.client[1]) / height) * h, w);
  } else if (drag?.moved && drag.selects) {
    byId("panels").classList.add("selecting");
    showBox(...selection(event));
  }
  if (pixels) showPlace();
});

function selection(event) { // from the start of the drag to the mouse, in the shape of the slice
  const [x0, y0] = drag.from, [x1, y1] = placeIn(drag.frame, event), { width, height } = slice();
  const w = Math.max(Math.abs(x1 - x0), (Math.abs(y1 - y0) * width) / height);
  return [x1 < x0 ? x0 - w : x0, y1 < y0 ? y0 - (w * height) / width : y0, w];
}

byId("panels").addEventListener("pointerup", (event) => {
  if (!drag) return;
  byId("panels").classList.remove("selecting");
  if (drag.moved && drag.selects) chooseRegion(...selection(event));
  else if (!drag.moved) {
    const place = pixelAt(drag.from), same = state.pinned && String(state.pinned) === String(place);
    choose({ pinned: same ? null : place });
  }
  drag = null;
});

byId("panels").addEventListener("pointercancel", () => {
  byId("panels").classList.remove("selecting");
  drag = null;
});

byId("panels").addEventListener("pointerleave", () => {
  hovered = null;
  if (pixels) showPlace();
});

byId("panels").addEventListener("dblclick", (event) => {
  if (event.target.closest(".frame")) choose({ region: null });
});

// ---- address: #slice=2&iterate=3&window=40,400&errors=200&show=images&region=10,20,64&at=30,40 ----

let writing = 0;
function writeAddress() {
  clearTimeout(writing);
  writing = setTimeout(() => {
    const parts = [`slice=${state.slice + 1}`];
    if (state.iterate < lastIterate()) parts.push(`iterate=${state.iterate}`);
    parts.push(`window=${presets[state.preset]?.[1] === null ? "full" : [state.level, state.width]}`);
    if (state.errorLimit !== initial.errorLimit) parts.push(`errors=${state.errorLimit}`);
    if (state.show !== initial.show) parts.push(`show=${state.show}`);
    if (state.region) parts.push(`region=${state.region}`);
    if (state.pinned) parts.push(`at=${state.pinned}`);
    history.replaceState(null, "", `#${parts.join("&")}`);
  }, 200); // browsers refuse many changes a second
}

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const numbers = (key, n) => {
    const values = (given.get(key) ?? "").split(",").map(Number);
    return given.get(key) && values.length === n && values.every(Number.isFinite) ? values : null;
  };
  const found = { ...initial };
  found.slice = clamp(Math.round(numbers("slice", 1)?.[0] ?? initial.slice + 1), 1, slices.length) - 1;
  found.iterate = Math.max(0, Math.round(numbers("iterate", 1)?.[0] ?? Infinity));
  const window_ = numbers("window", 2);
  if (given.get("window") === "full") found.preset = presets.length - 1;
  else if (window_ && window_[1] > 0) {
    found.preset = presets.findIndex(([, known]) => String(known) === String(window_));
    [found.level, found.width] = window_;
  }
  const limit = numbers("errors", 1);
  if (limit && limit[0] > 0) [found.errorLimit] = limit;
  if (["images", "errors"].includes(given.get("show"))) found.show = given.get("show");
  const { width, height } = slices[found.slice];
  const [x, y, w] = numbers("region", 3)?.map(Math.round) ?? [];
  const inside = x >= 0 && y >= 0 && w >= 1 && x + w <= width && y + Math.round((w * height) / width) <= height;
  if (inside && w < width) found.region = [x, y, w];
  const at = numbers("at", 2)?.map(Math.round);
  if (at && at[0] >= 0 && at[1] >= 0 && at[0] < width && at[1] < height) found.pinned = at;
  return found;
}

// ---- light and dark, start ----

function darkNow() {
  return document.documentElement.dataset.theme === "dark" ||
    (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
}

function nameTheme() { byId("theme").textContent = darkNow() ? "Light" : "Dark"; }

byId("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = darkNow() ? "light" : "dark";
  nameTheme();
});

function fill(select, names) {
  select.replaceChildren(...names.map(([text, value]) => new Option(text, value)));
}

function start() {
  byId("theme").hidden = false;
  nameTheme();
  if (slices.length === 0) return;
  if (typeof DecompressionStream === "undefined") {
    return say("This browser cannot unpack the slices (it has no DecompressionStream): use Chrome 80, " +
      "Firefox 113, Safari 16.4, or a newer version.");
  }
  byId("viewer").hidden = false;
  byId("browser").hidden = slices.length === 1;
  fill(byId("slice"), slices.map(({ name, psnr }, n) => [
    [n + 1, ...(psnr === null ? [] : [`${psnr} dB`]), name].join(" · "), n,
  ]));
  fill(byId("preset"), [...presets.map(([name], n) => [name, n]), ["own", -1]]);
  const scale = new ImageData(256, 1);
  settings.errorColours.forEach((colour, k) => scale.data.set([...colour, 255], 4 * k));
  byId("error-scale").getContext("2d").putImageData(scale, 0, 0);
  state = readAddress();
  openSlice();
  showThumbnails();
  addEventListener("resize", draw);
  addEventListener("hashchange", () => choose(readAddress()));
}

start();
