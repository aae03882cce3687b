// Colours of weights: a scale for what is shown, logarithmic or linear, on light ground and on dark.
const css = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();
let scheme = css("--scheme"); // asking the style sheet for each colour would take longer than drawing
const dark = () => scheme === "dark";

// Paints again when the reader, or the system, changes between light and dark.
function listenToTheme(paint) {
  const restyle = () => {
    scheme = css("--scheme");
    paint();
  };
  at("theme").addEventListener("click", () => {
    document.body.dataset.theme = dark() ? "light" : "dark";
    restyle();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
}

const colour = (level) => data.palette[dark() ? data.palette.length - 1 - level : level];

// The scale of some weights: its kind and ends, and where on it, from 0 to 1, a weight stands. The linear scale goes from
// 0 to the largest of these weights. The logarithmic one goes from `least` to 1; chosen automatically, it covers what is
// shown: from a third of the smallest (a twentieth of them left aside), and a hundredth of the largest at most.
function scaleOf(values, without = () => false, least = data.least) {
  const kind = state.scale === "auto" ? suited(values, without) : state.scale,
    most = largest(values, without);
  let [low, top] = [least, 1];
  if (kind === "linear") [low, top] = [0, most];
  else if (state.scale === "auto") {
    const positive = values.filter((value, n) => value > 0 && !without(n)).sort();
    [low, top] = [Math.max(least, Math.min(positive[Math.floor(positive.length / 20)] / 3, most / 100)), most];
  }
  const linear = (weight) => weight / (top || 1),
    log = (weight) => Math.log(weight / low) / Math.log(top / low),
    share = kind === "linear" ? linear : log;
  return { kind, low, top, most, share: (weight) => (weight > 0 ? Math.min(Math.max(share(weight), 0), 1) : 0) };
}

// The kind of scale that shows most of the mass: linear if at least LINEAR_MASS of it is in weights of a tenth of the
// largest or more, which a linear scale tells apart; otherwise most of the mass is in weights that it would leave blank.
const LINEAR_MASS = 0.8;

function suited(values, without) {
  const tenth = largest(values, without) / 10;
  let all = 0,
    seen = 0;
  for (let n = 0; n < values.length; n++) {
    if (!(values[n] > 0) || without(n)) continue;
    all += values[n];
    if (values[n] >= tenth) seen += values[n];
  }
  return seen >= LINEAR_MASS * all ? "linear" : "log";
}

const levelOf = (share) => Math.round(share * (data.levels - 1));

function largest(values, without = () => false) {
  let most = 0;
  for (let n = 0; n < values.length; n++) if (values[n] > most && !without(n)) most = values[n];
  return most;
}

// Black or white, whichever is easier to read on a colour: 4.5 : 1 at least, as WCAG 2.2 measures contrast.
function inkOn([r, g, b]) {
  const [x, y, z] = [r, g, b].map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * x + 0.7152 * y + 0.0722 * z > 0.179 ? "#000" : "#fff";
}

function rgb(name) {
  const pen = element("canvas").getContext("2d");
  pen.fillStyle = css(name);
  pen.fillRect(0, 0, 1, 1);
  return pen.getImageData(0, 0, 1, 1).data;
}

const headColour = (head, heads) => `hsl(${Math.round((360 * head) / heads + 330) % 360} 70% ${dark() ? 68 : 40}%)`;

// A canvas of rows × cols pixels; `level` says which colour, HIDDEN for that of what cannot be seen.
function painted(rows, cols, level) {
  const image = new ImageData(cols, rows),
    hidden = rgb("--nowhere"),
    table = data.palette.map((_, n) => colour(n));
  for (let r = 0; r < rows; r++) {
    for (let c = 0; c < cols; c++) {
      const found = level(r, c),
        shown = found === HIDDEN ? hidden : table[found],
        n = 4 * (r * cols + c);
      image.data[n] = shown[0];
      image.data[n + 1] = shown[1];
      image.data[n + 2] = shown[2];
      image.data[n + 3] = 255;
    }
  }
  const made = element("canvas");
  made.width = cols;
  made.height = rows;
  made.getContext("2d").putImageData(image, 0, 0);
  return made;
}

// What a scale's colours say: "weight, linear".
const namedScale = ({ kind }) => `${UNITS[state.measure]}, ${kind === "log" ? "logarithmic" : "linear"}`;

// The colours of weights along a scale, from its low end to its high one.
const weightStops = () => Array.from({ length: 9 }, (_, n) => `rgb(${colour(levelOf(n / 8))})`);

// The bar of colours under a picture of weights, with its ends.
function showScale(bar, scale) {
  bar.querySelector(".ramp").style.background = `linear-gradient(to right, ${weightStops()})`;
  bar.querySelector(".least").textContent = smallPercent(scale.low);
  bar.querySelector(".most").textContent = percent(scale.top);
  bar.querySelector(".kind").textContent = namedScale(scale);
}

const smallPercent = (weight) => (weight > 0 ? `${Number((100 * weight).toPrecision(1))} %` : "0");
