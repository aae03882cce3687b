// Of the page: what its canvases show, the map of a head and the mass that keys receive. Its values are in page.js.
// A canvas as sharp as the screen; drawn in CSS pixels.
function surface(canvas) {
  const box = canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(box.width * ratio);
  canvas.height = Math.round(box.height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, sans-serif";
  return [pen, box.width, box.height];
}

function picture(one) {
  const image = new ImageData(one.nc, one.nr), nowhere = element("canvas").getContext("2d");
  nowhere.fillStyle = css("--nowhere");
  nowhere.fillRect(0, 0, 1, 1);
  const hidden = nowhere.getImageData(0, 0, 1, 1).data;
  const start = state.head * one.nr * one.nc;
  for (let n = 0; n < one.nr * one.nc; n++) {
    const level = one.cells[start + n];
    const [r, g, b] = level === 255 ? hidden : colour(level);
    image.data.set([r, g, b, 255], 4 * n);
  }
  const small = element("canvas");
  small.width = one.nc;
  small.height = one.nr;
  small.getContext("2d").putImageData(image, 0, 0);
  return small;
}

function margins(one) {
  const named = (axis) => axis.text >= 0 && axis.n <= NAMED;
  return { left: named(one.queries) ? 96 : 64, below: named(one.keys) ? 96 : 38 };
}

function drawMap(one) {
  const [pen, width, height] = surface(at("map")), { left, below } = margins(one);
  const w = width - left, h = height - below;
  pen.imageSmoothingEnabled = false;
  pen.drawImage(picture(one), left, 0, w, h);
  pen.fillStyle = css("--quiet");
  ticks(one.queries).forEach(([n, text]) =>
    label(pen, text, left - 6, Math.max((h * (n + 0.5)) / one.queries.n, 6), 0, left - 20));
  const upright = one.keys.text < 0 || one.keys.n > NAMED;
  ticks(one.keys).forEach(([n, text]) => {
    const x = left + (w * (n + 0.5)) / one.keys.n, half = upright ? pen.measureText(text).width / 2 : 0;
    label(pen, text, Math.min(x, width - half), h + 6, upright ? null : -Math.PI / 2, upright ? Infinity : below - 22);
  });
  pen.fillStyle = css("--ink");
  pen.textAlign = "center";
  pen.textBaseline = "alphabetic";
  pen.fillText("key", left + w / 2, height - 4);
  pen.save();
  pen.translate(11, h / 2);
  pen.rotate(-Math.PI / 2);
  pen.fillText("query", 0, 0);
  pen.restore();
  pen.strokeStyle = css("--accent");
  pen.lineWidth = 2;
  pen.strokeRect(left + (w * state.col) / one.nc, (h * state.row) / one.nr, w / one.nc, h / one.nr);
}

// All tokens where there is room for their names, else a few round numbers.
function ticks(axis) {
  if (axis.text >= 0 && axis.n <= NAMED) return [...Array(axis.n).keys()].map((n) => [n, token(axis, n)]);
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5].find((s) => axis.n / s <= 8) || axis.n;
  return [...Array(Math.ceil(axis.n / step)).keys()].map((n) => [n * step, String(axis.first + n * step)]);
}

function label(pen, text, x, y, turn, room) {
  while (text.length > 2 && pen.measureText(text).width > room) text = `${text.slice(0, -2)}…`;
  pen.save();
  pen.translate(x, y);
  pen.rotate(turn ?? 0);
  pen.textAlign = turn === null ? "center" : "right";
  pen.textBaseline = turn === null ? "top" : "middle";
  pen.fillText(text, 0, 0);
  pen.restore();
}

function drawReceived(one) {
  const [pen, width, height] = surface(at("received")), count = one.masses.length / one.heads;
  const mass = one.masses.subarray(state.head * count, (state.head + 1) * count);
  const least = Math.max(Math.min(...mass), 1) / 1.5, bar = width / count; // logarithmic, from the least of all
  const range = Math.log(Math.max(...mass, 2) / least);
  const high = (value) => (Math.log(Math.max(value, least) / least) / range) * (height - 4);
  const key = one.colEdges[state.col], end = one.colEdges[state.col + 1];
  const first = (n) => (one.keyEdges ? one.keyEdges[n] : n);
  pen.fillStyle = css("--accent");
  pen.beginPath(); // one shape: bars of broken width would shimmer
  pen.moveTo(0, height);
  mass.forEach((value, n) => {
    pen.lineTo(n * bar, height - 1 - high(value));
    pen.lineTo((n + 1) * bar, height - 1 - high(value));
  });
  pen.lineTo(width, height);
  pen.fill();
  pen.fillStyle = css("--ink");
  mass.forEach((value, n) => {
    if (first(n) >= key && first(n) < end) pen.fillRect(n * bar, height - 1 - high(value), Math.max(bar, 2), high(value) + 1);
  });
}

function paintRamp() {
  const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => `rgb(${colour(Math.round(share * (data.levels - 1)))})`);
  at("ramp").style.background = `linear-gradient(to right, ${stops})`;
}
