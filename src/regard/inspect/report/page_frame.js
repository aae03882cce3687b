// The frame of a map: queries down and keys across, the part of them that is shown, their names, the cursor.
const NAME = 12; // CSS pixels that a token needs for its name at an axis
const LEAST_SHOWN = 8; // tokens that a map shows at least
let part = { row: 0, rows: 0, col: 0, cols: 0 }; // the tokens that the map shows

// A canvas as sharp as the screen; drawn in CSS pixels.
function surface(canvas) {
  const box = canvas.getBoundingClientRect(),
    ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(box.width * ratio);
  canvas.height = Math.round(box.height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, sans-serif";
  return [pen, box.width, box.height];
}

// Moves the part only where the cursor has left it: under a pointer, the map stands still.
function follow(one) {
  const side = (n, at, from, size) => {
    const wanted = Math.max(Math.min(n, LEAST_SHOWN), Math.ceil(n / 2 ** state.zoom));
    const inside = size === wanted && at >= from && at < from + size;
    return [inside ? from : Math.min(Math.max(at - (wanted >> 1), 0), n - wanted), wanted];
  };
  const [row, rows] = side(one.queries.n, cursor().query, part.row, part.rows);
  const [col, cols] = side(one.keys.n, cursor().key, part.col, part.cols);
  part = { row, rows, col, cols };
}

// Whether an axis names its tokens: they have names, and room for them.
const named = (axis, shown) => axis.text >= 0 && (at("map").clientWidth - 96) / shown >= NAME;

function margins(one) {
  return { left: named(one.queries, part.rows) ? 96 : 64, below: named(one.keys, part.cols) ? 96 : 38 };
}

// Draws a canvas of the part that is shown, with the names of its tokens, the cursor, and the line that is asked about.
function drawFramed(one, canvas) {
  const [pen, width, height] = surface(at("map")),
    { left, below } = margins(one);
  const w = width - left,
    h = height - below;
  pen.imageSmoothingEnabled = false;
  pen.drawImage(canvas, left, 0, w, h);
  pen.fillStyle = css("--quiet");
  ticks(one.queries, part.row, part.rows).forEach(([n, text]) =>
    label(pen, text, left - 6, Math.max((h * (n + 0.5)) / part.rows, 6), 0, left - 26),
  );
  const upright = !named(one.keys, part.cols);
  ticks(one.keys, part.col, part.cols).forEach(([n, text]) => {
    const x = left + (w * (n + 0.5)) / part.cols,
      half = upright ? pen.measureText(text).width / 2 : 0;
    label(pen, text, Math.min(x, width - half), h + 6, upright ? null : -Math.PI / 2, upright ? Infinity : below - 26);
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
  const { query, key } = cursor(),
    cellWide = Math.max(w / part.cols, 5),
    cellHigh = Math.max(h / part.rows, 5);
  const x = left + (w * (key - part.col + 0.5)) / part.cols,
    y = (h * (query - part.row + 0.5)) / part.rows;
  pen.globalAlpha = 0.55;
  pen.lineWidth = 1;
  pen.beginPath(); // the line of the token that the text beside the map is about
  if (asked() === "queries") pen.rect(left, y - cellHigh / 2, w, cellHigh);
  else pen.rect(x - cellWide / 2, 0, cellWide, h);
  pen.stroke();
  pen.globalAlpha = 1;
  pen.lineWidth = 2;
  pen.strokeRect(x - cellWide / 2, y - cellHigh / 2, cellWide, cellHigh);
}

// All tokens where there is room for their names, else a few round numbers.
function ticks(axis, from, count) {
  if (named(axis, count)) return [...Array(count).keys()].map((n) => [n, isolated(token(axis, from + n))]);
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5];
  const step = steps.find((s) => count / s <= 8) || count,
    start = axis.numbers ? from : axis.first + from, // numbers that do not grow by one are not round
    found = [];
  for (let n = Math.ceil(start / step) * step; n < start + count; n += step)
    found.push([n - start, String(numberOf(axis, from + n - start))]);
  return found;
}

function label(pen, text, x, y, turn, room) {
  while (text.length > 4 && pen.measureText(text).width > room)
    text = `${text.slice(0, text.endsWith("…\u2069") ? -3 : -2)}…\u2069`;
  pen.save();
  pen.translate(x, y);
  pen.rotate(turn ?? 0);
  pen.textAlign = turn === null ? "center" : "right";
  pen.textBaseline = turn === null ? "top" : "middle";
  pen.fillText(text, 0, 0);
  pen.restore();
}

// The query and key under a pointer; null outside of the map.
function pointedAt(event, one) {
  const box = at("map").getBoundingClientRect(),
    { left, below } = margins(one);
  const x = (event.clientX - box.left - left) / (box.width - left),
    y = (event.clientY - box.top) / (box.height - below);
  if (x < 0 || x >= 1 || y < 0 || y >= 1) return null;
  return { query: part.row + Math.floor(y * part.rows), key: part.col + Math.floor(x * part.cols) };
}

// How many sizes a map has, from all tokens to a few.
function zooms(one) {
  const longest = Math.max(one.queries.n, one.keys.n, LEAST_SHOWN);
  return Math.ceil(Math.log2(longest / LEAST_SHOWN)) + 1;
}

function zoom(by) {
  state.zoom += by;
  choose();
}

function leave() {
  if (!over) return;
  over = null;
  show();
}

// While the map has the focus, arrow keys move the head, with Shift the cursor; the pointer shows a pair.
function listenToMap() {
  at("map").addEventListener("keydown", (event) => {
    const arrow = ARROWS[event.key];
    if (!plain(event)) return;
    if (arrow && event.shiftKey) {
      state.query = within(cursor().query + arrow[0], current.queries.n);
      state.key = within(cursor().key + arrow[1], current.keys.n);
      choose();
    } else if (arrow) move(state.layer + arrow[0], state.head + arrow[1]);
    else if (event.key === "+" || event.key === "=") zoom(1);
    else if (event.key === "-") zoom(-1);
    else return;
    event.preventDefault();
  });
  at("map").addEventListener("pointermove", (event) => {
    over = event.pointerType === "mouse" ? pointedAt(event, current) : null;
    show();
  });
  at("map").addEventListener("pointerleave", leave);
  at("map").addEventListener("click", (event) => {
    Object.assign(state, pointedAt(event, current) ?? {});
    choose();
  });
  at("map").addEventListener("dblclick", () => zoom(1));
  at("closer").addEventListener("click", () => zoom(1));
  at("wider").addEventListener("click", () => zoom(-1));
}
