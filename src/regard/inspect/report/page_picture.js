// The image that was read, below its patches in one colour, the more opaque the more their weight; a click on a patch
// chooses it.
const OVERLAY = "rgb(236, 16, 140)"; // seldom in photographs, dark or light
const patched = (axis) =>
  data.picture !== null && axis.n === data.picture.special + data.picture.rows * data.picture.columns;

function showPatches(one, values, scale, skip) {
  const axis = shadedAxis(one),
    { rows, columns, special } = data.picture;
  at("patches").hidden = at("opacity-line").hidden = !patched(axis);
  at("opacity").value = state.opacity;
  if (!patched(axis)) return;
  const [pen, width, height] = surface(at("overlay")),
    w = width / columns,
    h = height / rows;
  pen.lineWidth = 0.5;
  for (let n = 0; n < rows * columns; n++) {
    const value = values[special + n],
      share = skip(special + n) ? 0 : scale.share(value);
    const patch = [(n % columns) * w, Math.floor(n / columns) * h, w, h];
    pen.globalAlpha = (state.opacity / 100) * share; // the image is seen through what has little weight
    pen.fillStyle = OVERLAY;
    pen.fillRect(...patch);
    pen.globalAlpha = 0.2 * (state.opacity / 100);
    pen.strokeStyle = css("--ground");
    pen.strokeRect(...patch);
  }
  pen.globalAlpha = 1;
  at("text-scale").querySelector(".ramp").style.background = `linear-gradient(to right, transparent, ${OVERLAY})`;
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
  at("opacity").addEventListener("input", () => {
    state.opacity = Number(at("opacity").value);
    writeAddress();
    show();
  });
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
