// A list of modifiers: what each of them has to say of itself, and how a list of them is run.
#pragma once
#include <type_traits>

#include "core/check.h"
#include "core/rows.h"

namespace regard {

template <int V>
struct Block;

// The gradient of one tile's scores on its way back through the modifiers, and where the gradients of the modifiers' own tensors go.
struct ScoreGradients {
  const regard_gradients& wanted;
  float* ds;                  // [kTile][kQueries], of the scores after a modifier; it leaves that of the scores before it
  const float* derivative;  // [kTile][kQueries], as the block form of the modifier that has one wrote it
  int64_t from, to;           // the keys of the tile that are computed
};

// What a modifier is unless it says otherwise. Besides, each has
//   State<V>          what it keeps of a block of queries; Block<V> inherits it
//   used(call)        whether the call has it
//   apply, block form: one key against V vectors of queries, (block, tile, key of the tile, scores, derivatives)
//   apply, row form:   one query against W keys, (RowKeys, scores, derivatives)
// Scores are in base 2. A modifier that has_derivative also writes the derivative of the score by its argument.
struct Modifier {
  // Whether the members of the call that it reads are possible: REGARD_DONE, or what is wrong.
  static int32_t check(const regard_call&) { return REGARD_DONE; }

  // Whether it may differ between the query heads of a group; asked where a call has it.
  static bool differs_by_head(const regard_call&) { return true; }

  static constexpr bool hides = true;           // whether it can make a score -inf
  static constexpr bool has_derivative = false;  // whether it does more than add; there is room for the derivative of one

  // Fills the state, once for each block of queries.
  template <int V>
  static void begin(Block<V>&) {}

  // Brings to scratch what it reads of a tile.
  template <int V>
  static void load_tile(const Block<V>&, const Tile&) {}

  // Whether the gradient of a tensor of its own is wanted; how many doubles that takes for each head, 0 where it is added to its place.
  static bool wants_grad(const regard_gradients&) { return false; }
  static int64_t grad_size(const regard_gradients&) { return 0; }

  // Whether that gradient sums dS times numbers far above 1: then delta is summed from the weights, as dS is, to the last digit.
  static constexpr bool multiplies_delta = false;

  // Takes its gradient from one tile's, to `sum`, the grad_size doubles of the head, and changes ds to the gradient of its argument.
  template <int V>
  static void backward(const Block<V>&, const Tile&, const ScoreGradients&, double* /* sum */) {}

  // Writes the gradient of a head.
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
    return wrong;
  }

  static bool used(const regard_call& c) { return (Each::used(c) || ...); }

  static bool differ_by_head(const regard_call& c) { return ((Each::used(c) && Each::differs_by_head(c)) || ...); }

  static bool hide(const regard_call& c) { return ((Each::hides && Each::used(c)) || ...); }

  static bool have_derivative(const regard_call& c) { return ((Each::has_derivative && Each::used(c)) || ...); }

  template <class One>
  static bool used_besides(const regard_call& c) {
    return ((!std::is_same_v<One, Each> && Each::used(c)) || ...);
  }

  template <int V>
  static void begin(Block<V>& b) {
    ((Each::used(b.c) ? Each::begin(b) : void()), ...);
  }

  template <int V>
  static void load_tile(const Block<V>& b, const Tile& t) {
    ((Each::used(b.c) ? Each::load_tile(b, t) : void()), ...);
  }

  template <int V>
  REGARD_INLINE void apply(const Block<V>& b, const Tile& t, int64_t n, vf (&s)[V], vf (&derivative)[V]) {
    ((Each::used(b.c) ? Each::apply(b, t, n, s, derivative) : void()), ...);
  }

  REGARD_INLINE void apply(const RowKeys& x, vf& s, vf& derivative) {
    ((Each::used(x.f.c) ? Each::apply(x, s, derivative) : void()), ...);
  }

  static bool wants_grad(const regard_gradients& g) { return (Each::wants_grad(g) || ...); }

  static bool multiply_delta(const regard_gradients& g) { return ((Each::multiplies_delta && Each::wants_grad(g)) || ...); }

  // Whether the call has every modifier whose gradient is wanted.
  static bool have_wanted(const regard_gradients& g) { return ((Each::used(g.call) || !Each::wants_grad(g)) && ...); }

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
  static void join_grads(const regard_gradients& g, double* const* sums, int64_t parts) { (join_grad<Each>(g, *sums++, parts), ...); }

 private:
  template <int V, class First, class... Rest>
  REGARD_INLINE void backward_from(const Block<V>& b, const Tile& t, const ScoreGradients& g, double* const* sums, int64_t place) {
    if constexpr (sizeof...(Rest) > 0) backward_from<V, Rest...>(b, t, g, sums + 1, place);
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
