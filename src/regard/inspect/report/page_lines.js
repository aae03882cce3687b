// Lines between two columns of tokens, queries left and keys right, for one or several heads in their colours.
const SHOWN_LINES = 512; // tokens of each column; of a longer text, those around the chosen one
const LEAST_LINE = 0.01; // the weight from which a line is drawn
const LINE = 24; // the height of a token, in CSS pixels

const drawnHeads = () => [...new Set([state.head, ...state.heads])].sort((a, b) => a - b);

function showLines(one) {
  const left = tokensAround(one.queries, cursor().query, SHOWN_LINES),
    right = tokensAround(one.keys, cursor().key, SHOWN_LINES);
  fillTokens(at("left"), one.queries, left, "lines");
  fillTokens(at("right"), one.keys, right, "lines");
  mark(at("left"), cursor().query, asked() === "queries");
  mark(at("right"), cursor().key, asked() === "keys");
  const values = shadedWeights(one),
    skip = leftOutTokens(one),
    scale = scaleOf(values, skip, leastShade(one));
  const other = asked() === "queries" ? at("right") : at("left"),
    own = asked() === "queries" ? at("left") : at("right");
  shadeTokens(other, values, scale, skip);
  shadeTokens(own, [], scale, () => true);
  showHeads(one);
  showList(one, shares(one, state.head), skip);
  drawLines(one, left, right, scale);
}

// The canvas covers what the box shows, and is drawn again when the box is scrolled.
function drawLines(one, left, right, scale) {
  const box = at("columns"),
    canvas = at("lines");
  canvas.style.height = `${box.clientHeight}px`;
  const [pen, width, height] = surface(canvas),
    skip = leftOut(one),
    top = box.scrollTop;
  const high = (n, from) => (n - from + 0.5) * LINE - top;
  const line = (query, key, weight, hue, strong) => {
    const a = high(query, left[0]),
      b = high(key, right[0]);
    if (Math.max(a, b) < 0 || Math.min(a, b) > height) return;
    pen.strokeStyle = hue;
    pen.globalAlpha = strong ? 0.15 + 0.85 * scale.share(weight) ** 1.5 : 0.3 * Math.sqrt(weight);
    pen.lineWidth = strong ? 1 + 2.5 * Math.sqrt(weight) : 1;
    pen.beginPath();
    pen.moveTo(0, a);
    pen.bezierCurveTo(width / 2, a, width / 2, b, width, b);
    pen.stroke();
  };
  drawnHeads().forEach((head) => {
    const hue = headColour(head, one.heads);
    if (!over) each(one, head, left, (query, key, weight) => !skip(query, key) && line(query, key, weight, hue, false));
    const values = shares(one, head);
    values.forEach((weight, n) => {
      const [query, key] = asked() === "queries" ? [cursor().query, n] : [n, cursor().key];
      if (weight >= LEAST_LINE && key >= right[0] && key < right[1] && !skip(query, key)) line(query, key, weight, hue, true);
    });
  });
  pen.globalAlpha = 1;
}

// The pairs of the shown queries whose weight is worth a line.
function each(one, head, [from, to], use) {
  for (let query = from; query < to; query++) {
    if (!one.whole) {
      if (place(one, query)[1] === query)
        heaviestKeys(one, head, query).forEach(([key, weight]) => weight >= 0.1 && use(query, key, weight));
      continue;
    }
    const start = (head * one.queries.n + query) * one.keys.n;
    for (let key = 0; key < one.keys.n; key++) {
      const level = one.weights[start + key];
      if (level !== HIDDEN && level >= data.steps * 0.32) use(query, key, weightOf(level)); // a tenth and more
    }
  }
}

function showHeads(one) {
  const shown = drawnHeads();
  at("heads").replaceChildren(
    ...Array.from({ length: one.heads }, (_, head) => {
      const chip = element("button", "chip", `H${head}`);
      chip.type = "button";
      chip.dataset.head = head;
      chip.setAttribute("aria-pressed", String(shown.includes(head)));
      chip.style.setProperty("--chip", headColour(head, one.heads));
      return chip;
    }),
  );
}

function toggleHead(head) {
  const shown = drawnHeads();
  if (!shown.includes(head)) state.heads = [...state.heads, head];
  else if (shown.length > 1) {
    state.heads = shown.filter((other) => other !== head);
    if (head === state.head) state.head = state.heads[0];
  }
}
