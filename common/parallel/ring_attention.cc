#include "common/parallel/ring_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>
#include <utility>
#include <vector>

#include "common/ops/saved_object.h"
#include "common/parallel/partial_attention.h"

namespace tandem::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Rows of this rank that attend to rows of another rank's block.
struct Piece {
  int64_t row, rows, key, keys;
  bool causal;

  at::Tensor RowsOf(const at::Tensor& x) const { return x.narrow(1, row, rows); }
  at::Tensor KeysOf(const at::Tensor& pair) const { return pair.narrow(2, key, keys); }
};

// A block on its way to the next rank, and one on its way from the rank before.
struct Transfer {
  at::Tensor outgoing, incoming;
  Pending sent, received;  // after the tensors: gone before them

  at::Tensor Finish() {
    sent.Wait();
    received.Wait();
    return incoming;
  }
};

// [T, heads, D] -> [G, T, M, D]; see partial_attention.h.
at::Tensor Grouped(const at::Tensor& x, int64_t groups) {
  return x.unflatten(1, {groups, x.size(1) / groups}).transpose(0, 1).contiguous();
}

// And back: [G, T, M, D] -> [T, heads, D].
at::Tensor Ungrouped(const at::Tensor& x) { return x.transpose(0, 1).flatten(1, 2); }

at::Tensor Paired(const at::Tensor& k, const at::Tensor& v) {
  return at::stack({k.transpose(0, 1), v.transpose(0, 1)});
}

}  // namespace

// At step i this rank has the block of the rank i before it.
class Ring {
 public:
  Ring(std::shared_ptr<Communicator> communicator, const ContextShard& shard);

  // Rotated q [t, heads, D], k and v [t, key_value_heads, D] -> the sums over all keys.
  AttentionSum Forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const;
  // The gradients of q, grouped, and of k and v, as a pair; in SumType.
  std::pair<at::Tensor, at::Tensor> Backward(const AttentionRows& rows, const at::Tensor& k,
                                             const at::Tensor& v) const;

 private:
  struct Step {
    int64_t block_rows;         // of the rank whose block is here
    std::vector<Piece> pieces;  // none empty
  };

  // Sends `block` on; the rank before sends its own, which the next step works on.
  Transfer StartTransfer(const at::Tensor& block, size_t next_step) const;

  const std::shared_ptr<Communicator> communicator_;
  std::vector<Step> steps_;
};

Ring::Ring(std::shared_ptr<Communicator> communicator, const ContextShard& shard)
    : communicator_(std::move(communicator)) {
  const int size = shard.num_ranks, rank = shard.rank;
  TORCH_CHECK(communicator_->size() == size && communicator_->rank() == rank, "ring: rank ",
              communicator_->rank(), " of ", communicator_->size(), " with the shard of rank ",
              rank, " of ", size);
  for (int i = 0; i < size; ++i) {
    const int source = (rank + size - i) % size;
    Step step = {.block_rows = shard.NumRows(source), .pieces = {}};
    int64_t key = 0;
    for (size_t s = 0; s < shard.lengths.size(); ++s) {
      const auto sequence = static_cast<int64_t>(s);
      const ChunkRows own = shard.Chunks(rank, sequence), theirs = shard.Chunks(source, sequence);
      const int64_t row = shard.batch.offsets[s];
      // Of the chunks of an earlier rank, the first one is before both of this rank's and the other
      // after both; those of a later rank lie between this rank's two.
      Piece piece = {row, own.total(), key, own.total(), /*causal=*/true};
      if (source < rank) {
        piece = {row, own.total(), key, theirs.early, /*causal=*/false};
      } else if (source > rank) {
        piece = {row + own.early, own.late, key, theirs.total(), /*causal=*/false};
      }
      if (piece.rows > 0 && piece.keys > 0) step.pieces.push_back(piece);
      key += theirs.total();
    }
    steps_.push_back(std::move(step));
  }
}

Transfer Ring::StartTransfer(const at::Tensor& block, size_t next_step) const {
  const int rank = communicator_->rank(), size = communicator_->size();
  std::vector<int64_t> sizes = block.sizes().vec();
  sizes[2] = steps_[next_step % steps_.size()].block_rows;
  Transfer transfer = {
      .outgoing = block, .incoming = at::empty(sizes, block.options()), .sent = {}, .received = {}};
  const auto send = [&] { transfer.sent = communicator_->SendAsync(block, (rank + 1) % size); };
  const auto receive = [&] {
    transfer.received = communicator_->RecvAsync(transfer.incoming, (rank + size - 1) % size);
  };
  // NCCL does the transfers between two ranks one after the other: if both sent first, both would
  // wait for ever.
  if (rank % 2 == 0) {
    send();
    receive();
  } else {
    receive();
    send();
  }
  return transfer;
}

AttentionSum Ring::Forward(const at::Tensor& q_in, const at::Tensor& k, const at::Tensor& v) const {
  TORCH_CHECK(q_in.size(0) == steps_[0].block_rows, "ring: ", q_in.size(0), " rows, not ",
              steps_[0].block_rows);
  const at::Tensor q = Grouped(q_in, k.size(1));
  const auto options = q.options().dtype(SumType(q.scalar_type()));
  AttentionSum sum = {.output = at::zeros(q.sizes(), options),
                      .log_sum = at::full({q.size(0), q.size(1), q.size(2), 1},
                                          -std::numeric_limits<double>::infinity(), options)};
  at::Tensor pair = Paired(k, v);
  for (size_t i = 0; i < steps_.size(); ++i) {
    Transfer next;
    if (i + 1 < steps_.size()) next = StartTransfer(pair, i + 1);
    for (const Piece& piece : steps_[i].pieces) {
      AddAttention(piece.RowsOf(q), piece.KeysOf(pair), piece.causal,
                   {piece.RowsOf(sum.output), piece.RowsOf(sum.log_sum)});
    }
    pair = next.Finish();
  }
  return sum;
}

std::pair<at::Tensor, at::Tensor> Ring::Backward(const AttentionRows& rows, const at::Tensor& k,
                                                 const at::Tensor& v) const {
  const auto options = rows.q.options().dtype(SumType(rows.q.scalar_type()));
  at::Tensor dq = at::zeros(rows.q.sizes(), options);
  at::Tensor pair = Paired(k, v), own;
  // What a block's own rank adds stays there; the sum of the others follows the block, a step
  // behind, and comes home after the last one.
  Transfer sums;
  for (size_t i = 0; i < steps_.size(); ++i) {
    Transfer next;
    if (i + 1 < steps_.size()) next = StartTransfer(pair, i + 1);
    at::Tensor dpair = at::zeros(pair.sizes(), options);
    for (const Piece& piece : steps_[i].pieces) {
      AddAttentionGradients({piece.RowsOf(rows.q), piece.RowsOf(rows.dy),
                             piece.RowsOf(rows.log_sum), piece.RowsOf(rows.delta)},
                            piece.KeysOf(pair), piece.causal, piece.RowsOf(dq),
                            piece.KeysOf(dpair));
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
                            const at::Tensor& v, const std::shared_ptr<const Ring>& ring) {
    const AttentionSum sum = ring->Forward(q, k, v);
    at::Tensor output = Ungrouped(sum.output).flatten(1, 2).to(q.scalar_type());
    context->save_for_backward({q, k, v, output, sum.log_sum});
    context->saved_data["ring"] = ops::SaveObject(ring);
    return output;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const auto ring = ops::SavedObject<const Ring>(context->saved_data["ring"]);
    const int64_t groups = k.size(1);
    const at::Tensor dy = gradients[0].view(q.sizes());
    const at::ScalarType type = SumType(q.scalar_type());
    const at::Tensor delta =
        (dy.to(type) * saved[3].view(q.sizes()).to(type)).sum(-1, /*keepdim=*/true);
    const auto [dq, dpair] = ring->Backward({.q = Grouped(q, groups),
                                             .dy = Grouped(dy, groups),
                                             .log_sum = saved[4],
                                             .delta = Grouped(delta, groups)},
                                            k, v);
    return {Ungrouped(dq).to(q.scalar_type()),
            dpair[0].transpose(0, 1).to(k.scalar_type()),
            dpair[1].transpose(0, 1).to(v.scalar_type()),
            {}};
  }
};

}  // namespace

RingContext::RingContext(std::shared_ptr<Communicator> communicator, const ContextShard& shard)
    : ring_(std::make_shared<Ring>(std::move(communicator), shard)) {}

at::Tensor RingContext::Attend(int64_t, const RaggedBatch&, const at::Tensor& q,
                               const at::Tensor& k, const at::Tensor& v) {
  return RingFunction::apply(q, k, v, ring_);
}

}  // namespace tandem::parallel
