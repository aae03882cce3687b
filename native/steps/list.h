// The members that a modifier defines, and the list that calls them for each modifier of a call.
#pragma once
#include "core/check.h"
#include "core/rows.h"

namespace regard {

template <int V>
struct Block;

// The gradients of one tile's scores, which pass the modifiers from the last to the first.
struct ScoreGradients {
  const regard_gradients& wanted;  // the gradients that the call wants
  float* ds;         // [kTile][kQueries], of the scores after a modifier, then before it; 0 of hidden pairs
  float* kept;       // [kTile][kQueries], what the block form of a modifier that keeps wrote; it may change it
  int64_t from, to;  // the keys of the tile that are computed
};

// ds · x, what a pair adds to a gradient: 0 of a hidden pair, whose ds is 0 and whose x may be NaN or infinite.
REGARD_INLINE vf gradient_term(vf ds, vf x) { return select(ds == vf{}, vf{}, ds * x); }

// What shares a number of a gradient that is added in place: batch elements along an axis, the heads, all queries, all
// keys. One item of work then adds to it.
struct GradientSharing {
  bool batch[REGARD_BATCH_AXES], heads, queries, keys;

  // Of a gradient (batch..., head, query, key): the axes along which it has a stride of 0.
  static GradientSharing of(const regard_tensor& t) {
    GradientSharing found{};
    for (int n = 0; n < REGARD_BATCH_AXES; ++n) found.batch[n] = t.batch[n] == 0;
    found.heads = t.head == 0;
    found.queries = t.row == 0;
    found.keys = t.col == 0;
    return found;
  }

  // How many sets of (batch element, key head) pairs share no gradient.
  int64_t independent(const regard_call& c) const {
    int64_t sets = heads ? 1 : c.key_heads;
    for (int n = 0; n < REGARD_BATCH_AXES; ++n) sets *= batch[n] ? 1 : c.batch[n];
    return sets;
  }

  // Calls body(batch element, key head) for each pair of one of these sets.
  template <class Body>
  void each_pair(const regard_call& c, int64_t set, const Body& body) const {
    const int64_t pairs = elements(c) * c.key_heads / independent(c);
    for (int64_t n = 0; n < pairs; ++n) {
      int64_t free = set, shared = n, element = 0, step = 1;
      int64_t& of_heads = heads ? shared : free;
      const int64_t key_head = of_heads % c.key_heads;
      of_heads /= c.key_heads;
      for (int m = REGARD_BATCH_AXES - 1; m >= 0; --m) {
        int64_t& rest = batch[m] ? shared : free;
        element += rest % c.batch[m] * step;
        rest /= c.batch[m];
        step *= c.batch[m];
      }
      body(element, key_head);
    }
  }

  void operator|=(const GradientSharing& other) {
    for (int n = 0; n < REGARD_BATCH_AXES; ++n) batch[n] |= other.batch[n];
    heads |= other.heads;
    queries |= other.queries;
    keys |= other.keys;
  }
};

// In the place of a modifier, for calls without one.
struct NoModifier {
  template <int V>
  static auto simply(const Block<V>&, int64_t, int) {
    return [](vf s, int64_t) __attribute__((always_inline)) { return s; };
  }
};

// The defaults of a modifier's members. Each modifier also defines
//   State<V>           its state for a block of queries; Block<V> inherits it
//   used(call)         whether the call has this modifier
//   apply, block form  one key and V vectors of queries; takes the block, the tile, the key of the tile, scores, what
//                      it keeps
//   apply, row form    one query and W keys; takes RowKeys, scores, derivatives
// Scores are in base 2. The row form of a modifier that does more than add to the score multiplies the derivative of
// all modifiers up to it by its own, that of the new score by the old one.
struct Modifier {
  // Checks the members of the call that it reads: REGARD_DONE, or the code of what is wrong.
  static int32_t check(const regard_call&) { return REGARD_DONE; }

  // Whether it may differ between the query heads of a group. (Called where the call has it.)
  static bool differs_by_head(const regard_call&) { return true; }

  // Whether it reads the positions of queries and keys, which the call then has. (Called where the call has it.)
  static bool compares_positions(const regard_call&) { return false; }

  static constexpr bool keeps =
      false;  // whether its block form keeps a number for each score of a tile, for `backward`

  // Floats that it keeps of a tile, where it keeps any.
  static int64_t kept_size(const regard_call&) { return kTile * kQueries; }

  // Floats of scratch that it takes for a tile.
  static constexpr int64_t scratch_size = 0;

  // Whether it defines `simply`, for the calls whose only modifier it is: a function of scores and a key of the tile,
  // whose first is given, for one vector of queries. What that reads is loaded once for all keys.
  static constexpr bool simple = false;

  // Fills the state, once for each block of queries; scratch: scratch_size floats.
  template <int V>
  static void begin(Block<V>&, float* /* scratch */) {}

  // Loads what it reads of a tile to its scratch.
  template <int V>
  static void load_tile(const Block<V>&, const Tile&) {}

  // Whether the gradient of its tensor is wanted, and how many doubles its sums take for each head; 0 where it is added
  // in place.
  static bool wants_grad(const regard_gradients&) { return false; }
  static int64_t grad_size(const regard_gradients&) { return 0; }

  // What shares a number of a gradient that is added in place.
  static GradientSharing sharing(const regard_gradients&) { return {}; }

  // Whether a gradient that is wanted sums dS times numbers far above 1: then delta is summed from the weights, as dS
  // is, to the last digit.
  static bool multiplies_delta(const regard_gradients&) { return false; }

  // Adds what one tile gives to the gradient of its tensor, to `sum` (grad_size doubles), and turns ds into the
  // gradient of the scores before it.
  template <int V>
  static void backward(const Block<V>&, const Tile&, const ScoreGradients&, double* /* sum */) {}

  // Writes the gradient of one head from its sum.
  static void write_grad(const regard_gradients&, int64_t /* head */, const double* /* sum */) {}
};

// Modifiers in the order in which they are applied.
template <class... Each>
struct ModifierList {
  static constexpr int count = sizeof...(Each);

  template <int V>
  struct State : Each::template State<V>... {};

  static int32_t check(const regard_call& c) {
    int32_t wrong = REGARD_DONE;
    ((wrong == REGARD_DONE ? (void)(wrong = Each::check(c)) : void()), ...);
    if (wrong == REGARD_DONE && compare_positions(c) && !c.q_at) wrong = REGARD_BAD_ARGUMENT;
    return wrong;
  }

  static bool used(const regard_call& c) { return (Each::used(c) || ...); }

  static bool differ_by_head(const regard_call& c) { return ((Each::used(c) && Each::differs_by_head(c)) || ...); }

  static bool compare_positions(const regard_call& c) {
    return ((Each::used(c) && Each::compares_positions(c)) || ...);
  }

  // Floats that the modifiers of a call keep of a tile.
  static int64_t kept_size(const regard_call& c) {
    return ((Each::keeps && Each::used(c) ? Each::kept_size(c) : 0) + ...);
  }

  // Floats of scratch for the modifiers of a call.
  static int64_t scratch_size(const regard_call& c) { return ((Each::used(c) ? Each::scratch_size : 0) + ...); }

  // Calls f with NoModifier, or the simple modifier that is the only one of a call; returns whether there is either.
  template <class F>
  static bool simply(const regard_call& c, const F& f) {
    const int used = ((Each::used(c) ? 1 : 0) + ...);
    if (used == 0) f(NoModifier{});
    return used == 0 || (used == 1 && (call_simple<Each>(c, f) || ...));
  }

  template <int V>
  static void begin(Block<V>& b) {
    float* scratch = b.w.modifiers;
    ((Each::used(b.c) ? (Each::begin(b, scratch), void(scratch += Each::scratch_size)) : void()), ...);
  }

  template <int V>
  static void load_tile(const Block<V>& b, const Tile& t) {
    ((Each::used(b.c) ? Each::load_tile(b, t) : void()), ...);
  }

  // kept: where the first modifier that keeps writes its numbers for the key, or null.
  template <int V>
  REGARD_INLINE void apply(const Block<V>& b, const Tile& t, int64_t n, vf (&s)[V], float* kept) {
    (apply_one<Each>(b, t, n, s, kept), ...);
  }

  REGARD_INLINE void apply(const RowKeys& x, vf& s, vf& derivative) {
    ((Each::used(x.f.c) ? Each::apply(x, s, derivative) : void()), ...);
  }

  static bool wants_grad(const regard_gradients& g) { return (Each::wants_grad(g) || ...); }

  static bool multiply_delta(const regard_gradients& g) { return (Each::multiplies_delta(g) || ...); }

  // Whether the call has every modifier whose gradient is wanted.
  static bool have_wanted(const regard_gradients& g) { return ((Each::used(g.call) || !Each::wants_grad(g)) && ...); }

  static GradientSharing sharing(const regard_gradients& g) {
    GradientSharing all{};
    ((all |= Each::sharing(g)), ...);
    return all;
  }

  static int64_t grad_size(const regard_gradients& g, int which) {
    const int64_t sizes[] = {Each::grad_size(g)...};
    return sizes[which];
  }

  // From the last to the first. sums: of each modifier, [place][grad_size].
  template <int V>
  static void backward(const Block<V>& b, const Tile& t, const ScoreGradients& g, double* const* sums, int64_t place) {
    backward_from<V, Each...>(b, t, g, sums, place);
  }

  // Adds the sums of `parts` parts, [part][head][grad_size], in order, and writes them.
  static void join_grads(const regard_gradients& g, double* const* sums, int64_t parts) {
    (join_grad<Each>(g, *sums++, parts), ...);
  }

 private:
  template <class One, class F>
  static bool call_simple(const regard_call& c, const F& f) {
    if constexpr (One::simple)
      if (One::used(c)) {
        f(One{});
        return true;
      }
    return false;
  }

  template <class One, int V>
  REGARD_INLINE void apply_one(const Block<V>& b, const Tile& t, int64_t n, vf (&s)[V], float*& kept) {
    if (!One::used(b.c)) return;
    vf own[V] = {};
    One::apply(b, t, n, s, own);
    if (!One::keeps || !kept) return;
    for (int v = 0; v < V; ++v) store(kept + v * W, own[v]);
    kept += kTile * kQueries;
  }

  template <int V, class First, class... Rest>
  REGARD_INLINE void backward_from(const Block<V>& b, const Tile& t, const ScoreGradients& g, double* const* sums,
                                   int64_t place) {
    ScoreGradients rest = g;
    if (First::keeps && First::used(b.c)) rest.kept += First::kept_size(b.c);
    if constexpr (sizeof...(Rest) > 0) backward_from<V, Rest...>(b, t, rest, sums + 1, place);
    if (First::used(b.c)) First::backward(b, t, g, *sums + place * First::grad_size(g.wanted));
  }

  template <class One>
  static void join_grad(const regard_gradients& g, double* sums, int64_t parts) {
    const int64_t size = One::grad_size(g), heads = g.call.heads;
    for (int64_t h = 0; size && h < heads; ++h) {
      double* sum = sums + h * size;
      for (int64_t part = 1; part < parts; ++part)
        for (int64_t n = 0; n < size; ++n) sum[n] += sum[part * heads * size + n];
      One::write_grad(g, h, sum);
    }
  }
};

}  // namespace regard
