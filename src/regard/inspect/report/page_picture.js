// The image that was read, below its patches in the colours of their weights; a click on a patch chooses it.
const patched = (axis) =>
  data.picture !== null && axis.n === data.picture.special + data.picture.rows * data.picture.columns;

function showPatches(one, values, most, skip, least) {
  const axis = shadedAxis(one),
    { rows, columns, special } = data.picture;
  at("patches").hidden = !patched(axis);
  if (!patched(axis)) return;
  const [pen, width, height] = surface(at("overlay")),
    w = width / columns,
    h = height / rows;
  pen.lineWidth = 0.5;
  for (let n = 0; n < rows * columns; n++) {
    const value = values[special + n],
      share = skip(special + n) ? 0 : shade(value, most, least);
    const patch = [(n % columns) * w, Math.floor(n / columns) * h, w, h];
    pen.globalAlpha = share > 0 ? 0.25 + 0.5 * share : 0;
    pen.fillStyle = `rgb(${colour(levelOf(share))})`;
    pen.fillRect(...patch);
    pen.globalAlpha = 0.35;
    pen.strokeStyle = css("--ground");
    pen.strokeRect(...patch);
  }
  pen.globalAlpha = 1;
  const own = chosen() - special;
  if (own < 0 || !patched(chosenAxis(one))) return;
  const frame = [(own % columns) * w, Math.floor(own / columns) * h, w, h];
  pen.lineWidth = 5;
  pen.strokeStyle = css("--ground");
  pen.strokeRect(...frame);
  pen.lineWidth = 2.5;
  pen.strokeStyle = css("--accent");
  pen.strokeRect(...frame);
}

function patchAt(event) {
  const box = at("overlay").getBoundingClientRect(),
    { rows, columns, special } = data.picture;
  const column = within(((event.clientX - box.left) / box.width) * columns, columns);
  return special + within(((event.clientY - box.top) / box.height) * rows, rows) * columns + column;
}

function listenToPatches() {
  const overlay = at("overlay");
  overlay.addEventListener("pointermove", (event) => {
    if (event.pointerType !== "mouse") return;
    over = {
      query: state.query,
      key: state.key,
      by: state.by,
      [state.by === "queries" ? "query" : "key"]: patchAt(event),
    };
    show();
  });
  overlay.addEventListener("pointerleave", leave);
  overlay.addEventListener("click", (event) => pick(state.by, patchAt(event)));
  overlay.addEventListener("keydown", (event) => {
    if (!(event.key in ARROWS) || !plain(event) || event.shiftKey) return;
    event.preventDefault();
    const { columns, special } = data.picture,
      [down, right] = ARROWS[event.key];
    pick(state.by, Math.max(chosen() + down * columns + right, special));
  });
}
