// All heads at a glance: a thumbnail each, in the order of layers or of a number, all of them or those of a finding.
const thumbs = [];

function listSheet() {
  const option = (text, value) => new Option(text, value);
  at("sort").replaceChildren(
    option("layer", "layer"),
    ...data.grids.flatMap((grid, n) => {
      const [below, above] = grid.signs ? grid.signs.map((sign) => ` (${sign})`) : ["", ""];
      return [
        option(`${grid.label}, largest first${above}`, `${n}`),
        option(`${grid.label}, smallest first${below}`, `-${n}`),
      ];
    }),
  );
  const filters = data.findings.map((found, n) => [found, n]).filter(([found]) => found.heads.length);
  at("filter").replaceChildren(option("all heads", ""), ...filters.map(([found, n]) => option(found.title, String(n))));
}

// Shows the thumbnails of the heads that the lists above them ask for.
function fillSheet() {
  const by = at("sort").value,
    finding = data.findings[Number(at("filter").value)];
  const grid = by === "layer" ? null : data.grids[Math.abs(Number(by))],
    sign = by.startsWith("-") ? 1 : -1;
  let heads = data.layers.flatMap((layer, l) => Array.from({ length: layer.heads }, (_, h) => [l, h]));
  if (at("filter").value)
    heads = heads.filter(([l, h]) => finding.heads.some((named) => named[0] === l && named[1] === h));
  const value = ([l, h]) => grid.values[l][h] ?? -Infinity;
  if (grid) heads.sort((a, b) => sign * (value(a) - value(b)));
  const matrix = !grid && !at("filter").value,
    most = Math.max(...data.layers.map((layer) => layer.heads));
  at("sheet").style.setProperty("--columns", matrix ? most : 0);
  at("sheet").classList.toggle("matrix", matrix);
  thumbs.length = 0;
  at("sheet").replaceChildren(
    ...heads.map(([l, h]) => {
      const made = element("div", "thumb"),
        name = nameOf(l, h);
      made.dataset.at = `${l},${h}`;
      made.setAttribute("role", "option");
      made.style.gridColumnStart = matrix && h === 0 ? "1" : "";
      made.setAttribute("aria-label", grid ? `${name}, ${grid.label} ${inWords(grid, l, h)}` : name);
      const picture = element("canvas");
      picture.setAttribute("aria-hidden", "true");
      made.append(picture, element("span", "", name));
      if (grid) made.append(element("small", grid.signs ? side(grid, l, h) : "", number(grid, l, h)));
      thumbs.push([made, l, h]);
      return made;
    }),
  );
  at("count").textContent = countOf(heads.length, "head");
  paintSheet();
  markSheet();
}

async function paintSheet() {
  for (const [made, l, h] of [...thumbs]) {
    const layer = data.layers[l],
      [rows, cols] = layer.thumb;
    layer.thumbLevels ??= inflate(layer.thumbs);
    const levels = await layer.thumbLevels,
      canvas = made.querySelector("canvas");
    canvas.width = cols;
    canvas.height = rows;
    canvas.getContext("2d").drawImage(
      painted(rows, cols, (r, c) => levels[(h * rows + r) * cols + c]),
      0,
      0,
    );
  }
}

function markSheet() {
  const here = `${state.layer},${state.head}`,
    shown = thumbs.some(([made]) => made.dataset.at === here);
  thumbs.forEach(([made], n) => {
    const on = made.dataset.at === here;
    made.tabIndex = on || (!shown && n === 0) ? 0 : -1;
    made.setAttribute("aria-selected", String(on));
  });
}

// The head that an arrow key leads to from a thumbnail, along the sheet as it is laid out.
function besideThumb(from, key) {
  const places = thumbs.map(([made]) => made.getBoundingClientRect()),
    n = thumbs.findIndex(([made]) => made === from);
  if (key === "ArrowLeft") return thumbs[Math.max(n - 1, 0)];
  if (key === "ArrowRight") return thumbs[Math.min(n + 1, thumbs.length - 1)];
  const down = key === "ArrowDown",
    here = places[n];
  const found = places
    .map((box, m) => [m, box])
    .filter(([, box]) => (down ? box.top > here.top + 4 : box.top < here.top - 4));
  if (!found.length) return thumbs[n];
  const next = down ? Math.min(...found.map(([, box]) => box.top)) : Math.max(...found.map(([, box]) => box.top));
  const line = found.filter(([, box]) => Math.abs(box.top - next) < 4);
  const distance = ([, box]) => Math.abs(box.left - here.left);
  return thumbs[line.reduce((best, one) => (distance(one) < distance(best) ? one : best))[0]];
}
