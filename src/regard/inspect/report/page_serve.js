// Of a page that is served (regard look --serve): the rows that are shown are asked for, and stand in place of those
// that the page holds, exact to the last digit.
const ROWS = 256; // that a layer keeps, the last ones
let asking = false,
  ended = false;

async function askRow(one, head, query) {
  const answer = await fetch(`row?layer=${one.number}&head=${head}&query=${query}`);
  if (!answer.ok) throw new Error(await answer.text());
  one.exact.set(`${head},${query}`, new Float32Array(await answer.arrayBuffer()));
  if (one.exact.size > ROWS) one.exact.delete(one.exact.keys().next().value);
}

// Asks for the rows that are shown and not there yet; what is chosen meanwhile is asked for afterwards.
whenShown = async (one) => {
  if (asking || ended || asked() !== "queries" || one.measure !== "weights") return;
  const query = cursor().query,
    heads = state.view === "lines" ? drawnHeads() : [state.head],
    missing = heads.filter((head) => !exactRow(one, head, query));
  if (!missing.length) return;
  asking = true;
  try {
    await Promise.all(missing.map((head) => askRow(one, head, query)));
  } catch {
    ended = true;
    at("served").textContent = "The server has stopped. Exact rows need a running regard look --serve.";
  }
  asking = false;
  if (one === current) show();
};
