// The images that were read, below their patches in the colours of their changes; a patch is chosen in both images.
const OPAQUE = 0.75; // of the colour of the largest change

function patchedSide(side, axis) {
  const image = data.pictures[side];
  return image && axis.n === image.special + image.rows * image.columns;
}

function showSidePatches(side, own, shaded, values, scale) {
  const { rows, columns, special } = data.pictures[side],
    [pen, width, height] = surface(at(`${side}-overlay`)),
    [wide, high] = [width / columns, height / rows],
    box = (n) => [(n % columns) * wide, Math.floor(n / columns) * high, wide, high];
  const { lost, gained } = signedEnds();
  for (let n = 0; n < rows * columns; n++) {
    const change = values[placeOf(shaded, special + n)];
    pen.globalAlpha = Math.abs(change) > 0 ? OPAQUE * scale.share(Math.abs(change)) : 0;
    pen.fillStyle = `rgb(${change < 0 ? lost : gained})`;
    pen.fillRect(...box(n));
  }
  const token = firstToken(own, chosen()) - special;
  if (token < 0 || !patchedSide(side, own.axis)) return;
  pen.globalAlpha = 1;
  [["--ground", 5], ["--accent", 2.5]].forEach(([colour, line]) => {
    pen.lineWidth = line;
    pen.strokeStyle = css(colour);
    pen.strokeRect(...box(token));
  });
}

function listenToSidePatches(side) {
  const canvas = at(`${side}-overlay`),
    { rows, columns, special } = data.pictures[side],
    of = () => sideAxis(current, side, state.by);
  const patchAt = (event) => {
    const box = canvas.getBoundingClientRect(),
      row = within(((event.clientY - box.top) / box.height) * rows, rows);
    return special + row * columns + within(((event.clientX - box.left) / box.width) * columns, columns);
  };
  canvas.addEventListener("pointermove", (event) => {
    if (event.pointerType !== "mouse" || !patchedSide(side, of().axis)) return;
    const place = placeOf(of(), patchAt(event));
    over = { query: state.query, key: state.key, by: state.by, [state.by === "queries" ? "query" : "key"]: place };
    show();
  });
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("click", (event) => {
    if (patchedSide(side, of().axis)) pick(state.by, placeOf(of(), patchAt(event)));
  });
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in ARROWS) || !plain(event) || event.shiftKey || !patchedSide(side, of().axis)) return;
    event.preventDefault();
    const [down, right] = ARROWS[event.key],
      wanted = firstToken(of(), chosen()) + down * columns + right;
    pick(state.by, placeOf(of(), Math.min(Math.max(wanted, special), of().axis.n - 1)));
  });
}
