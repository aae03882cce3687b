// Colours of changes: one for a weight that fell, one for a weight that rose, and the ground between them.
let ends = { scheme: "", lost: [], gained: [], still: [] };

function signedEnds() {
  if (ends.scheme !== scheme) {
    const of = (name) => [...rgb(name)].slice(0, 3);
    ends = { scheme, lost: of("--lost"), gained: of("--gained"), still: of("--still") };
  }
  return ends;
}

function signedColour(change, scale) {
  const { lost, gained, still } = signedEnds(),
    share = scale.share(Math.abs(change)),
    end = change < 0 ? lost : gained;
  return still.map((part, n) => Math.round(part + share * (end[n] - part)));
}

const signed = (share) =>
  Math.abs(share) < 1e-4 ? "≈ 0 %" : `${share < 0 ? "−" : "+"}${percent(Math.abs(share))}`;

// The colours of changes, from what fell most to what rose most.
const changeStops = () => ["lost", "still", "gained"].map((name) => `rgb(${signedEnds()[name]})`);

// The bar of these colours, with its ends.
function showSigned(bar, { kind, low, top, most }) {
  bar.querySelector(".ramp").style.background = `linear-gradient(to right, ${changeStops()})`;
  bar.querySelector(".least").textContent = most > 0 ? `−${percent(top)}` : "0";
  bar.querySelector(".most").textContent = most > 0 ? `+${percent(top)}` : "0";
  bar.querySelector(".kind").textContent =
    `weight after less weight before, ${kind === "log" ? `logarithmic from ${smallPercent(low)}` : "linear"}`;
}
