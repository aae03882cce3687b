// What is shown of each pair: its weight; weight × norm of what the value adds; the mean of the heads' weights; or rollout,
// the share of each first input in a token behind the layer. All but weights are made here, as a layer of the same form.
const MEASURES = { carried: carriedLayer, mean: meanLayer, rollout: rolloutLayer };
const WAYS = {
  carried: "this page was made without it: report.with_heads(rg.heads.carried(model, text)), or --carried",
  rollout: "for one stack of self-attention layers and at most 512 tokens, of which the page holds all weights",
};
const UNITS = { weights: "weight", carried: "share of the largest norm", mean: "mean weight", rollout: "share" };
const ofMeasure = {}; // by layer and measure, the promise of it
let headBefore = null; // the head that was shown before all of them were

const hasRollout = data.layers.every(
  (one) => one.whole && /^L\d+$/.test(one.place) && one.queries.n === data.layers[0].queries.n && oneText(one),
);
const offered = { weights: true, carried: data.carried !== null, mean: true, rollout: hasRollout };
document.querySelectorAll('[data-choice="measure"]').forEach((button) => {
  button.disabled = !offered[button.value];
  if (button.disabled) button.title = WAYS[button.value];
});
const ofAllHeads = (measure) => measure === "mean" || measure === "rollout";
const fileOf = (one) => (one.measure === "weights" ? "" : `${one.measure}-`);
const inUnitsOf = (one, head) => head.map((name) => (name === "weight" ? UNITS[one.measure] : name));

// The layer with the numbers of the measure that is chosen.
async function measured(one) {
  if (!offered[state.measure]) state.measure = "weights";
  const measure = state.measure,
    all = ofAllHeads(measure);
  if (all) headBefore ??= state.head;
  else if (headBefore !== null) [state.head, headBefore] = [headBefore, null];
  const found = measure === "weights" ? one : await (ofMeasure[`${one.number} ${measure}`] ??= MEASURES[measure](one));
  at("numbers").hidden = at("heads").hidden = at("head").disabled = all;
  at("measured").textContent = explained(found);
  return found;
}

function titleOf(one, name) {
  const layer = data.layers[one.number].place || `L${one.number}`;
  if (one.measure === "mean") return `${layer}, mean of heads`;
  if (one.measure === "rollout") return `rollout to ${layer}`;
  return one.measure === "carried" ? `${name} carried norm` : name;
}

function explained(one) {
  if (one.measure === "carried") {
    const most = one.most[Math.min(state.head, one.heads - 1)].toPrecision(3);
    return `weight × norm of what the key's value adds to the output, ‖v W‖, in percent of the largest norm of this head, ${most}`;
  }
  if (one.measure === "mean") {
    const { heads } = data.layers[one.number];
    return heads === 1 ? "the weights of this layer's only head" : `the mean of the weights of all ${heads} heads of this layer`;
  }
  if (one.measure === "rollout")
    return "the share of each input token in a token behind this layer: half of it stays in the residual stream in every layer, half moves by the mean weights of the heads";
  return "";
}

function saidOfMeasure(one, count, mass) {
  if (one.measure === "carried")
    return `${count} largest: norms that add up to ${(mass * one.most[state.head]).toPrecision(3)}`;
  if (asked() === "keys") return `${count} largest`;
  return `${count} largest, ${percent(Math.min(mass, 1))} of ${one.measure === "mean" ? "the mass" : "all shares"}`;
}

const levelsOf = (values) => Uint8Array.from(values, (value) => Math.round(Math.sqrt(value) * data.steps));
const cellLevel = (value) =>
  value > 0 ? Math.max(Math.round((1 - Math.log(value) / Math.log(data.least)) * (data.levels - 1)), 0) : 0;

async function carriedLayer(one) {
  const given = data.carried[one.number],
    names = ["norms", "maps", "topKeys", "topWeights", "received"],
    bytes = Object.fromEntries(await Promise.all(names.map(async (name) => [name, await inflate(given[name])]))),
    norms = shorts(bytes.norms),
    { n: nq } = one.queries,
    { n: nk } = one.keys;
  const carried = one.weights.map((level, at) => {
    if (level === HIDDEN) return HIDDEN;
    const norm = norms[Math.floor(at / (nq * nk)) * nk + (at % nk)] / SHARES;
    return Math.round(level * Math.sqrt(norm)); // levels are steps of the square root
  });
  return {
    ...one,
    measure: "carried",
    most: given.most,
    exact: new Map(),
    weights: carried,
    cells: bytes.maps,
    heaviest: one.wide ? new Uint32Array(bytes.topKeys.buffer) : shorts(bytes.topKeys),
    heaviestWeights: shorts(bytes.topWeights),
    masses: shorts(bytes.received),
    best: given.best,
  };
}

// A layer with one head, of these bytes; `sums` are what each key, or cell of keys, receives.
function singleHead(one, measure, weights, cells, sums) {
  const most = Math.max(...sums) || 1,
    order = [...sums.keys()].sort((a, b) => sums[b] - sums[a]).slice(0, 8);
  return {
    ...one,
    measure,
    heads: 1,
    rank: 0, // of single keys the page knows nothing beyond the cells
    exact: new Map(),
    weights,
    cells,
    masses: Uint16Array.from(sums, (sum) => (sum / most) * SHARES),
    best: [one.keyEdges ? [] : order.map((key) => [key, sums[key]])],
  };
}

// The mean over heads of numbers (heads, n); HIDDEN is 0 beside heads that see the pair, and HIDDEN where none does.
function meanOfHeads(values, heads, read, write) {
  const n = values.length / heads;
  return new Uint8Array(n).map((_, at) => {
    let sum = 0,
      seen = false;
    for (let head = 0; head < heads; head++) {
      const value = values[head * n + at];
      if (value === HIDDEN) continue;
      seen = true;
      sum += read(value);
    }
    return seen ? write(sum / heads) : HIDDEN;
  });
}

async function meanLayer(one) {
  const weights = meanOfHeads(one.weights, one.heads, weightOf, (p) => Math.round(Math.sqrt(p) * data.steps)),
    cells = meanOfHeads(one.cells, one.heads, pooledWeight, cellLevel),
    most = Math.max(...one.best.map((best) => best[0]?.[1] ?? 0)),
    n = one.masses.length / one.heads,
    sums = new Float32Array(n);
  one.masses.forEach((mass, at) => (sums[at % n] += (mass * most) / (SHARES * one.heads)));
  return singleHead(one, "mean", weights, cells, sums);
}

// Of each layer the product of the matrices ½ + ½ P up to it, P the mean of its heads: n × n numbers.
const products = [];

function product(number) {
  products[number] ??= (async () => {
    const before = number ? await product(number - 1) : null,
      mean = (await meanLayer(await open(number))).weights,
      n = data.layers[number].queries.n,
      found = new Float32Array(n * n);
    for (let i = 0; i < n; i++) {
      let sum = 0; // steps of weights may add up to a little more or less than 1
      for (let k = 0; k < n; k++) if (mean[i * n + k] !== HIDDEN) sum += weightOf(mean[i * n + k]);
      for (let k = 0; k < n; k++) {
        const level = mean[i * n + k],
          share = (k === i ? 0.5 : 0) + (level === HIDDEN || !sum ? 0 : (0.5 * weightOf(level)) / sum);
        if (!share) continue;
        if (!before) found[i * n + k] += share;
        else for (let j = 0; j < n; j++) found[i * n + j] += share * before[k * n + j];
      }
    }
    return found;
  })();
  return products[number];
}

async function rolloutLayer(one) {
  const found = await product(one.number),
    n = one.keys.n,
    sums = new Float32Array(n);
  found.forEach((share, at) => (sums[at % n] += share));
  const weights = levelsOf(found).map((level, at) => (found[at] > 0 ? level : HIDDEN));
  return singleHead(one, "rollout", weights, one.cells, sums);
}
