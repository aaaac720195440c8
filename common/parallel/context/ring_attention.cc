#include "common/parallel/context/ring_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>
#include <vector>

#include "common/ops/attention/partial_attention.h"
#include "common/ops/linear/saved_object.h"

namespace tandem::parallel {
namespace {

using ops::AttentionRows;
using ops::AttentionSum;
using ops::PartialScores;
using ops::SumType;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Consecutive rows of this rank, and the keys of another rank's shard that they attend to.
struct Span {
  int64_t row, rows, key, keys;
  bool causal;

  at::Tensor RowsOf(const at::Tensor& x) const { return x.narrow(1, row, rows); }
  at::Tensor KeysOf(const at::Tensor& pair) const { return pair.narrow(1, key, keys); }
  // The scores of these rows and keys, given the positions of all rows and of all keys that are
  // here.
  PartialScores ScoresOf(const ops::AttentionScores& scores, const at::Tensor& row_positions,
                         const at::Tensor& key_positions) const {
    if (scores.window == kNoWindow) return {.scores = scores, .causal = causal};
    return {.scores = scores,
            .causal = causal,
            .row_positions = row_positions.narrow(0, row, rows),
            .key_positions = key_positions.narrow(0, key, keys)};
  }
};

// Keys and values on their way to the next rank, and others on their way from the previous one.
struct Transfer {
  at::Tensor outgoing, incoming;
  ranks::CollectiveHandle sent, received;  // destroyed before the tensors

  at::Tensor Finish() {
    sent.Wait();
    received.Wait();
    return incoming;
  }
};

// Keys and values of one attention as they travel, in one tensor (ops/partial_attention.h).
struct KeysAndValues {
  const at::Tensor &k, &v;
  bool values_in_keys;

  at::Tensor Pair() const {
    const at::Tensor keys = k.transpose(0, 1);
    return values_in_keys ? keys.contiguous() : at::cat({keys, v.transpose(0, 1)}, 2);
  }
};

}  // namespace

// The n steps of one attention. At step i this rank has the keys and values of the rank i places
// before it.
class Ring {
 public:
  Ring(std::shared_ptr<ranks::Communicator> communicator, const ContextShard& shard);

  // Rotated q [t, heads, D], k [t, key_value_heads, D] and v [t, key_value_heads, Dv] -> the sums
  // over the keys of its window.
  AttentionSum Forward(const at::Tensor& q, const KeysAndValues& keys,
                       const ops::AttentionScores& scores) const;
  // The gradients of q, grouped, and of k and v, as a pair; in SumType.
  std::pair<at::Tensor, at::Tensor> Backward(const AttentionRows& rows, const KeysAndValues& keys,
                                             const ops::AttentionScores& scores) const;

 private:
  struct Step {
    int64_t source_rows;      // of the rank whose keys and values are here
    at::Tensor positions;     // [source_rows]
    std::vector<Span> spans;  // none empty
  };

  // Starts to send `pair` to the next rank, and to receive the pair that `next_step` works on.
  Transfer StartTransfer(const at::Tensor& pair, size_t next_step) const;

  const std::shared_ptr<ranks::Communicator> communicator_;
  std::vector<Step> steps_;
};

Ring::Ring(std::shared_ptr<ranks::Communicator> communicator, const ContextShard& shard)
    : communicator_(std::move(communicator)) {
  const int size = shard.num_ranks, rank = shard.rank;
  TORCH_CHECK(communicator_->size() == size && communicator_->rank() == rank, "ring: rank ",
              communicator_->rank(), " of ", communicator_->size(), " with the shard of rank ",
              rank, " of ", size);
  for (int i = 0; i < size; ++i) {
    const int source = (rank + size - i) % size;
    Step step = {
        .source_rows = shard.NumRows(source), .positions = shard.Positions(source), .spans = {}};
    int64_t key = 0;
    for (size_t s = 0; s < shard.lengths.size(); ++s) {
      const auto sequence = static_cast<int64_t>(s);
      const ChunkRows own = shard.Chunks(rank, sequence), theirs = shard.Chunks(source, sequence);
      const int64_t row = shard.batch.offsets[s];
      // An earlier rank's first chunk comes before both of this rank's, its second after both. A
      // later rank's two chunks come between this rank's.
      Span span = {row, own.total(), key, own.total(), /*causal=*/true};
      if (source < rank) {
        span = {row, own.total(), key, theirs.early, /*causal=*/false};
      } else if (source > rank) {
        span = {row + own.early, own.late, key, theirs.total(), /*causal=*/false};
      }
      if (span.rows > 0 && span.keys > 0) step.spans.push_back(span);
      key += theirs.total();
    }
    steps_.push_back(std::move(step));
  }
}

Transfer Ring::StartTransfer(const at::Tensor& pair, size_t next_step) const {
  const int rank = communicator_->rank(), size = communicator_->size();
  std::vector<int64_t> sizes = pair.sizes().vec();
  sizes[1] = steps_[next_step % steps_.size()].source_rows;
  Transfer transfer = {
      .outgoing = pair, .incoming = at::empty(sizes, pair.options()), .sent = {}, .received = {}};
  const auto send = [&] { transfer.sent = communicator_->SendAsync(pair, (rank + 1) % size); };
  const auto receive = [&] {
    transfer.received = communicator_->RecvAsync(transfer.incoming, (rank + size - 1) % size);
  };
  // NCCL does the transfers between two ranks one after the other: if both sent first, both would
  // block for ever.
  if (rank % 2 == 0) {
    send();
    receive();
  } else {
    receive();
    send();
  }
  return transfer;
}

AttentionSum Ring::Forward(const at::Tensor& q_in, const KeysAndValues& keys,
                           const ops::AttentionScores& scores) const {
  TORCH_CHECK(q_in.size(0) == steps_[0].source_rows, "ring: ", q_in.size(0), " rows, not ",
              steps_[0].source_rows);
  const at::Tensor q = ops::GroupHeads(q_in, keys.k.size(1));
  AttentionSum sum = ops::NoAttention(q, keys.v.size(2));
  at::Tensor pair = keys.Pair();
  for (size_t i = 0; i < steps_.size(); ++i) {
    Transfer next;
    if (i + 1 < steps_.size()) next = StartTransfer(pair, i + 1);
    for (const Span& span : steps_[i].spans) {
      ops::AddAttention(span.RowsOf(q), span.KeysOf(pair),
                        span.ScoresOf(scores, steps_[0].positions, steps_[i].positions),
                        {span.RowsOf(sum.output), span.RowsOf(sum.log_sum)});
    }
    pair = next.Finish();
  }
  return sum;
}

std::pair<at::Tensor, at::Tensor> Ring::Backward(const AttentionRows& rows,
                                                 const KeysAndValues& keys,
                                                 const ops::AttentionScores& scores) const {
  const auto options = rows.q.options().dtype(SumType(rows.q.scalar_type()));
  at::Tensor dq = at::zeros(rows.q.sizes(), options);
  at::Tensor pair = keys.Pair(), own;
  // A rank keeps the gradients that it adds to its own keys and values. The sum of those of the
  // other ranks follows the pair round the ring, one step behind, and arrives after the last step.
  Transfer sums;
  for (size_t i = 0; i < steps_.size(); ++i) {
    Transfer next;
    if (i + 1 < steps_.size()) next = StartTransfer(pair, i + 1);
    at::Tensor dpair = at::zeros(pair.sizes(), options);
    for (const Span& span : steps_[i].spans) {
      ops::AddAttentionGradients({span.RowsOf(rows.q), span.RowsOf(rows.dy),
                                  span.RowsOf(rows.log_sum), span.RowsOf(rows.delta)},
                                 span.KeysOf(pair),
                                 span.ScoresOf(scores, steps_[0].positions, steps_[i].positions),
                                 span.RowsOf(dq), span.KeysOf(dpair));
    }
    if (i == 0) {
      own = dpair;
    } else {
      if (i > 1) dpair.add_(sums.Finish());
      sums = StartTransfer(dpair, i + 1);
    }
    pair = next.Finish();
  }
  if (steps_.size() > 1) own.add_(sums.Finish());
  return {dq, own};
}

namespace {

class RingFunction : public torch::autograd::Function<RingFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const std::shared_ptr<const Ring>& ring,
                            const AttentionLayer& layer) {
    const AttentionSum sum = ring->Forward(q, {k, v, layer.values_in_keys}, layer.scores);
    at::Tensor output = ops::UngroupHeads(sum.output).flatten(1, 2).to(q.scalar_type());
    context->save_for_backward({q, k, v, output, sum.log_sum});
    context->saved_data["ring"] = ops::SaveObject(ring);
    context->saved_data["layer"] = ops::SaveObject(std::make_shared<const AttentionLayer>(layer));
    return output;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const auto ring = ops::SavedObject<const Ring>(context->saved_data["ring"]);
    const auto layer = ops::SavedObject<const AttentionLayer>(context->saved_data["layer"]);
    const int64_t groups = k.size(1), width = k.size(2);
    const at::Tensor dy = gradients[0].view({q.size(0), q.size(1), v.size(2)});
    const at::ScalarType type = SumType(q.scalar_type());
    const at::Tensor delta =
        (dy.to(type) * saved[3].view(dy.sizes()).to(type)).sum(-1, /*keepdim=*/true);
    const auto [dq, dpair] = ring->Backward({.q = ops::GroupHeads(q, groups),
                                             .dy = ops::GroupHeads(dy, groups),
                                             .log_sum = saved[4],
                                             .delta = ops::GroupHeads(delta, groups)},
                                            {k, v, layer->values_in_keys}, layer->scores);
    const at::Tensor by_row = dpair.transpose(0, 1);
    // The gradient of keys has that of values in it where values are keys.
    const at::Tensor dv = layer->values_in_keys
                              ? at::Tensor()
                              : by_row.narrow(2, width, v.size(2)).to(v.scalar_type());
    return {ops::UngroupHeads(dq).to(q.scalar_type()),
            by_row.narrow(2, 0, width).to(k.scalar_type()),
            dv,
            {},
            {}};
  }
};

}  // namespace

RingContext::RingContext(std::shared_ptr<ranks::Communicator> communicator,
                         const ContextShard& shard)
    : communicator_(std::move(communicator)), ring_(std::make_shared<Ring>(communicator_, shard)) {}

at::Tensor RingContext::Attend(const AttentionLayer& layer, const RaggedBatch&, const at::Tensor& q,
                               const at::Tensor& k, const at::Tensor& v) {
  return RingFunction::apply(q, k, v, ring_, layer);
}

at::Tensor RingContext::SumOverRanks(const at::Tensor& values) {
  at::Tensor sum = values.clone();
  communicator_->AllReduce(sum, ranks::Reduction::kSum);
  return sum;
}

}  // namespace tandem::parallel
