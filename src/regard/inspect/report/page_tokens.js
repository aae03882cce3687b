// Lists of tokens that can be chosen from, and of bars.
const SHOWN_TOKENS = 2048; // of a longer text, those around the chosen one
const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const plain = (event) => !(event.ctrlKey || event.altKey || event.metaKey);

// Which tokens of an axis are shown: all, or a run that holds the one named and moves only when that leaves it.
function tokensAround(axis, holds, shown) {
  if (axis.n <= shown) return [0, axis.n];
  const from = Math.min(Math.max(Math.floor((2 * holds) / shown) * (shown / 2) - shown / 4, 0), axis.n - shown);
  return [from, from + shown];
}

// Fills a list with tokens, unless it has them.
function fillTokens(list, axis, [from, to], named) {
  const content = [axis.text, axis.first, axis.numbers?.slice(from, to), from, to, named].join();
  if (list.dataset.content === content) return;
  list.dataset.content = content;
  const numbers = Array.from({ length: to - from }, (_, n) => from + n);
  list.replaceChildren(
    ...numbers.map((n) => {
      const word = tokenElement("token", token(axis, n));
      word.dataset.n = n;
      word.setAttribute("role", "option");
      word.tabIndex = -1;
      return word;
    }),
  );
}

// Marks the chosen token of a list, which the Tab key then reaches.
function mark(list, number, on) {
  list.querySelectorAll("[tabindex='0'], .on").forEach((word) => {
    word.tabIndex = -1;
    word.classList.remove("on");
    word.setAttribute("aria-selected", "false");
  });
  const found = list.querySelector(`[data-n="${number}"]`),
    word = found ?? list.firstElementChild;
  if (!word) return;
  word.tabIndex = 0;
  word.classList.toggle("on", on && found !== null);
  word.setAttribute("aria-selected", String(on && found !== null));
}

// Brings the chosen token into the part of its list that is to be seen; the page itself stays where it is.
function reveal(list) {
  const word = list.querySelector(".on");
  if (
    !word ||
    (word.offsetTop >= list.scrollTop && word.offsetTop + word.offsetHeight <= list.scrollTop + list.clientHeight)
  )
    return;
  list.scrollTop = word.offsetTop - list.clientHeight / 2;
}

function bar(axis, n, share, number) {
  const made = element("li", "bar-line"),
    word = tokenElement("word", token(axis, n)),
    track = element("span", "track");
  const fill = element("i");
  fill.style.setProperty("--w", `${Math.min(100, 100 * share)}%`);
  track.append(fill);
  made.append(word, element("small", "", String(numberOf(axis, n))), track, element("span", "share", number));
  return made;
}

function fillNumbers(select, count, text, shown) {
  if (select.options.length !== count) {
    select.replaceChildren(...Array.from({ length: count }, (_, n) => new Option(text(n), String(n))));
  }
  select.value = String(shown);
}

// A list of tokens: the pointer shows one, a click or an arrow key chooses one, up to the `last`.
function listen(list, { hover, pick, last }) {
  const number = (event) => event.target.closest?.("[data-n]")?.dataset.n;
  list.addEventListener("pointerover", (event) => {
    const n = number(event);
    if (event.pointerType === "mouse" && n !== undefined) hover(Number(n));
  });
  list.addEventListener("pointerleave", () => leave());
  list.addEventListener("click", (event) => {
    const n = number(event);
    if (n !== undefined) pick(Number(n));
  });
  list.addEventListener("keydown", async (event) => {
    const n = Number(number(event)),
      across = list.id === "left" || list.id === "right";
    const steps = {
      ArrowLeft: across ? 0 : -1,
      ArrowRight: across ? 0 : 1,
      ArrowUp: -1,
      ArrowDown: 1,
      Home: -n,
      End: last() - n,
    };
    if (!(event.key in steps) || !plain(event) || event.shiftKey) return;
    event.preventDefault();
    await pick(Math.min(Math.max(n + steps[event.key], 0), last()));
    list.querySelector("[tabindex='0']")?.focus();
  });
}
