#include "common/loss/logits/linear_cross_entropy.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/kernels/cpu/cpu_kernels.h"
#include "common/loss/logits/output_rows.h"
#include "common/ops/linear/bfloat16_linear.h"
#include "common/ops/ops.h"
#include "common/ops/products/matrix_product.h"
#include "common/tensor/aten/device_copies.h"

namespace tandem::loss {
namespace {

// Columns of a tile on a GPU, which wants larger products. (With some hundred rows, the product of
// a tile of kTileColumns runs at full speed on the CPU, and its logits have a few MB.)
constexpr int64_t kGpuTileColumns = 32768;
// Units of work of one thread: rows of a cell, slices of a tile's weight gradient, and splits of
// the vocabulary that the hidden gradient is summed over. Every unit packs its factors anew.
constexpr int64_t kCellRows = 256, kWeightSlices = 2, kHiddenSplits = 8;
// Minimum of kept rows: with fewer, reading and writing the gradient of the weight for every chunk
// takes longer than computing the logits a second time.
constexpr int64_t kMinKeptRows = 64;

// Values of `batch.loss_impl`.
constexpr std::pair<absl::string_view, LossImpl> kConfiguredImpls[] = {
    {"auto", LossImpl::kAuto},
    {"cce", LossImpl::kTiles},
    {"torch_compile", LossImpl::kRows},
    {"pytorch", LossImpl::kAten}};

// Whether the CPU's products are so fast that computing logits twice takes less time than keeping
// them. That holds for kTiles alone: recomputed, the others have tiles of few rows and all columns.
// Ranks of a group, which may have different CPUs, must agree, because they exchange statistics
// once per chunk. Float32 needs no agreement: no float32 product prefers to recompute.
bool PrefersRecompute(const ops::MatrixRows& weight, LossImpl impl,
                      ops::TensorParallelGroup* group) {
  const bool bfloat16 = weight.scalar_type() == at::kBFloat16;
  if (!weight.is_cpu() || (!bfloat16 && weight.scalar_type() != at::kFloat)) return false;
  const kernels::CpuKernels& cpu = kernels::GetCpuKernels();
  const bool here = impl == LossImpl::kTiles && (bfloat16 ? cpu.bfloat16_product.prefers_recompute
                                                          : cpu.float_product.prefers_recompute);
  if (group == nullptr || !bfloat16) return here;
  return group->Max(at::full({1}, here ? 1.0 : 0.0, at::kDouble)).item<double>() > 0;
}

}  // namespace

const char* LossImplName(LossImpl impl) {
  switch (impl) {
    case LossImpl::kAuto:
      return "auto";
    case LossImpl::kTiles:
      return "tiles";
    case LossImpl::kRows:
      return "rows";
    case LossImpl::kAten:
      return "aten";
  }
  return "unknown";
}

absl::StatusOr<LossImpl> ParseLossImpl(absl::string_view name) {
  for (const auto& [value, impl] : kConfiguredImpls) {
    if (name == value) return impl;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("must be auto, cce, torch_compile or pytorch, got '", name, "'"));
}

// One call: its rows on the device, and the logits of some of them at a time.
class LinearCrossEntropyLoss::Call {
 public:
  Call(LinearCrossEntropyLoss& loss, const at::Tensor& hidden, const OutputRows& rows,
       LossMode mode)
      : loss_(loss),
        count_(static_cast<int64_t>(rows.positions.size())),
        keep_(mode == LossMode::kGradientInForward),
        grid_rows_(EqualChunkRows(count_, keep_ ? loss.chunk_rows_ : loss.tile_rows_)),
        rounds_hidden_(RoundsHidden(hidden, loss.weight_)),
        positions_(CopyToDevice(rows.positions, loss.weight_.device())),
        labels_(CopyToDevice(rows.labels, loss.weight_.device())),
        options_(loss.weight_.options().dtype(loss.logits_type_).requires_grad(false)) {
    const at::Tensor selected = SelectRows(hidden, rows.positions, positions_);
    input_ = rounds_hidden_ ? ops::RoundedRows(selected) : selected.to(product_type());
    if (!rows.temperatures.empty()) {
      scales_ = CopyToDevice(rows.temperatures, options_.device()).to(options_).reciprocal_();
    }
    const int64_t needed = grid_rows_ * (keep_ ? loss.weight_.size(0) : loss.tile_columns_);
    buffer_ = loss.buffer_->AtLeast(needed, options_);
  }

  // The number of rows that Statistics and Backward work on together.
  int64_t group_rows() const { return keep_ ? grid_rows_ : count_; }

  // Returns the statistics of the rows [begin, end). In kGradientInForward their logits stay in the
  // buffer.
  RowStatistics Statistics(int64_t begin, int64_t end) const {
    const RowStatistics tiles = EmptyRowStatistics(Tiles(), end - begin, options_);
    ForGrids(begin, end, [&](const Grid& grid) {
      ForCells(grid, [&](const Cell& cell) {
        ComputeLogits(cell);
        loss_.kernels_->statistics(cell, RowsOf(tiles, cell.tile, cell.begin - begin, cell.count));
      });
    });
    const RowStatistics own = MergeTiles(tiles);
    return loss_.vocabulary_.is_whole() ? own : MergeRanks(own, *loss_.vocabulary_.group);
  }

  // Adds the gradients of the rows [begin, end), given d loss / d logp and d loss / d entropy.
  void Backward(int64_t begin, int64_t end, const RowStatistics& rows,
                const std::vector<double>& logprob_coefficients,
                const std::vector<double>& entropy_coefficients, OutputGradients& gradients) const {
    const RowGradients all =
        Coefficients(begin, end, rows, logprob_coefficients, entropy_coefficients);
    at::Tensor hidden;
    if (gradients.hidden.defined()) {
      hidden = at::zeros({end - begin, loss_.weight_.size(1)}, options_);
    }
    ForGrids(begin, end, [&](const Grid& grid) {
      ForCells(grid, [&](const Cell& cell) {
        if (!keep_) ComputeLogits(cell);
        const auto rows_of = [&](const at::Tensor& x) {
          return x.narrow(0, cell.begin - begin, cell.count);
        };
        loss_.kernels_->gradient(cell,
                                 {.max = rows_of(all.max),
                                  .constants = rows_of(all.constants),
                                  .slopes = rows_of(all.slopes),
                                  .at_label = rows_of(all.at_label)},
                                 product_type());
      });
      if (gradients.weight.defined()) AddWeightGradient(grid, gradients.weight);
      if (hidden.defined()) {
        AddHiddenGradient(grid, hidden.narrow(0, grid.begin - begin, grid.rows));
      }
    });
    if (hidden.defined()) {
      gradients.hidden.index_add_(0, positions_.narrow(0, begin, end - begin),
                                  hidden.to(gradients.hidden.scalar_type()));
    }
  }

 private:
  // The logits that the buffer holds at a time: some rows, with all of their tiles or with one.
  struct Grid {
    int64_t begin, rows;
    int64_t first_tile, tiles;
  };
  // Some rows of a tile of a grid: the work of one thread.
  struct Cell : LogitTile {
    int64_t tile;
    int64_t begin, count;
  };

  at::ScalarType product_type() const { return loss_.weight_.scalar_type(); }
  int64_t Tiles() const {
    return (loss_.weight_.size(0) + loss_.tile_columns_ - 1) / loss_.tile_columns_;
  }
  int64_t FirstColumn(int64_t tile) const { return tile * loss_.tile_columns_; }
  int64_t Columns(int64_t tile) const {
    return std::min(loss_.tile_columns_, loss_.weight_.size(0) - FirstColumn(tile));
  }
  ops::MatrixRows Weight(int64_t tile) const {
    return loss_.weight_.Narrow(FirstColumn(tile), Columns(tile));
  }

  template <typename Work>
  void ForGrids(int64_t begin, int64_t end, const Work& work) const {
    const int64_t tiles = keep_ ? Tiles() : 1;
    for (; begin < end; begin += grid_rows_) {
      for (int64_t tile = 0; tile < Tiles(); tile += tiles) {
        work(Grid{begin, std::min(grid_rows_, end - begin), tile, tiles});
      }
    }
  }

  // Rows of a grid that a thread works on together.
  int64_t CellRows(const Grid& grid) const {
    return loss_.parallel_tiles_ ? EqualChunkRows(grid.rows, kCellRows) : grid.rows;
  }

  // [rows, columns], contiguous: the tiles of a grid lie one after the other.
  at::Tensor Logits(const Grid& grid, int64_t tile) const {
    const int64_t before = grid.rows * (FirstColumn(tile) - FirstColumn(grid.first_tile));
    return buffer_.narrow(0, before, grid.rows * Columns(tile)).view({grid.rows, Columns(tile)});
  }

  // Calls work(i) for [0, count). With parallel tiles each thread runs whole products: waiting for
  // the slowest thread after every product would cost a tenth of the time.
  template <typename Work>
  void ForEach(int64_t count, const Work& work) const {
    if (!loss_.parallel_tiles_) {
      for (int64_t i = 0; i < count; ++i) work(i);
      return;
    }
    at::parallel_for(0, count, /*grain_size=*/1, [&](int64_t begin, int64_t end) {
      const at::NoGradGuard no_grad;  // a setting of this thread
      for (int64_t i = begin; i < end; ++i) work(i);
    });
  }

  template <typename Work>
  void ForCells(const Grid& grid, const Work& work) const {
    const int64_t cell_rows = CellRows(grid);
    const int64_t blocks = (grid.rows + cell_rows - 1) / cell_rows;
    ForEach(blocks * grid.tiles, [&](int64_t index) {
      Cell cell;
      cell.tile = grid.first_tile + index / blocks;
      const int64_t row = index % blocks * cell_rows;
      cell.begin = grid.begin + row;
      cell.count = std::min(cell_rows, grid.rows - row);
      cell.logits = Logits(grid, cell.tile).narrow(0, row, cell.count);
      cell.first_label = loss_.vocabulary_.first + FirstColumn(cell.tile);
      cell.labels = labels_.narrow(0, cell.begin, cell.count);
      if (scales_.defined()) cell.scales = scales_.narrow(0, cell.begin, cell.count);
      cell.soft_cap = loss_.soft_cap_;
      work(cell);
    });
  }

  void ComputeLogits(const Cell& cell) const {
    const at::Tensor input = input_.narrow(0, cell.begin, cell.count);
    // The bits of a rollout server's logits, at about the speed of Product.
    if (loss_.parallel_tiles_ && product_type() == at::kFloat) {
      Weight(cell.tile).LinearOnThread(cell.logits, input);
    } else if (loss_.parallel_tiles_ && rounds_hidden_) {
      ops::Bfloat16LinearOnThread(cell.logits, input, Weight(cell.tile).dense());
    } else if (loss_.parallel_tiles_) {
      ops::MatrixProductOnThread(cell.logits, input, Weight(cell.tile).dense().t());
    } else {
      Weight(cell.tile).MultiplyInto(cell.logits, input);
    }
    if (loss_.soft_cap_.has_value()) ops::SoftCap(cell.logits, *loss_.soft_cap_);
  }

  // The numbers of each row that the gradient of its logits depends on.
  RowGradients Coefficients(int64_t begin, int64_t end, const RowStatistics& rows,
                            const std::vector<double>& logprob_coefficients,
                            const std::vector<double>& entropy_coefficients) const {
    at::Tensor c = CopyToDevice(logprob_coefficients, options_.device());
    at::Tensor e = CopyToDevice(entropy_coefficients, options_.device());
    if (scales_.defined()) {
      c.mul_(scales_.narrow(0, begin, end - begin));
      e.mul_(scales_.narrow(0, begin, end - begin));
    }
    const auto narrowed = [&](const at::Tensor& x) { return x.to(loss_.logits_type_); };
    return {.max = narrowed(rows.max),
            .constants = narrowed((e * rows.weighted / rows.sum - c) / rows.sum),
            .slopes = narrowed(-e / rows.sum),
            .at_label = narrowed(c)};
  }

  // The following take a grid that holds the gradient of its logits.

  void AddWeightGradient(const Grid& grid, const at::Tensor& weight) const {
    const at::Tensor input = input_.narrow(0, grid.begin, grid.rows);
    const int64_t slices = loss_.parallel_tiles_ ? kWeightSlices : 1;
    ForEach(grid.tiles * slices, [&](int64_t index) {
      const int64_t tile = grid.first_tile + index / slices, slice = index % slices;
      const int64_t first = Columns(tile) * slice / slices;
      const int64_t columns = Columns(tile) * (slice + 1) / slices - first;
      const at::Tensor dz = GradientOf(Logits(grid, tile), product_type());
      (loss_.parallel_tiles_ ? ops::MatrixProductOnThread : ops::MatrixProductInto)(
          weight.narrow(0, FirstColumn(tile) + first, columns), dz.narrow(1, first, columns).t(),
          input, /*accumulate=*/true);
    });
  }

  // `hidden` [rows, H] are the rows of the grid. Where few rows cannot occupy the threads, the sum
  // over the vocabulary is split too, and every split has a sum of its own.
  void AddHiddenGradient(const Grid& grid, const at::Tensor& hidden) const {
    const int64_t cell_rows = CellRows(grid);
    const int64_t blocks = (grid.rows + cell_rows - 1) / cell_rows;
    const int64_t splits = loss_.parallel_tiles_ ? std::max<int64_t>(kHiddenSplits / blocks, 1) : 1;
    // The first split adds to `hidden` itself.
    const at::Tensor sums =
        at::zeros({splits - 1, hidden.size(0), hidden.size(1)}, hidden.options());
    ForEach(blocks * splits, [&](int64_t index) {
      const int64_t row = index / splits * cell_rows, split = index % splits;
      const int64_t count = std::min(cell_rows, grid.rows - row);
      AddHiddenGradient(grid, row, count, split, splits,
                        (split == 0 ? hidden : sums[split - 1]).narrow(0, row, count));
    });
    for (int64_t split = 1; split < splits; ++split) at::Tensor(hidden).add_(sums[split - 1]);
  }

  // Adds the gradient of `count` rows from `row` on over one of `splits` ranges of the columns.
  void AddHiddenGradient(const Grid& grid, int64_t row, int64_t count, int64_t split,
                         int64_t splits, const at::Tensor& hidden) const {
    const int64_t last_tile = grid.first_tile + grid.tiles - 1;
    const int64_t first = FirstColumn(grid.first_tile);
    const int64_t width = FirstColumn(last_tile) + Columns(last_tile) - first;
    const int64_t begin = first + width * split / splits,
                  end = first + width * (split + 1) / splits;
    for (int64_t tile = grid.first_tile; tile <= last_tile; ++tile) {
      const int64_t from = std::max(begin - FirstColumn(tile), int64_t{0});
      const int64_t columns = std::min(end - FirstColumn(tile), Columns(tile)) - from;
      if (columns <= 0) continue;
      const at::Tensor dz = GradientOf(Logits(grid, tile), product_type());
      Weight(tile)
          .Narrow(from, columns)
          .InputGradientInto(
              hidden, dz.narrow(0, row, count).narrow(1, from, columns), /*accumulate=*/true,
              loss_.parallel_tiles_ ? ops::PackThreads::kOne : ops::PackThreads::kAll);
    }
  }

  LinearCrossEntropyLoss& loss_;
  const int64_t count_;
  const bool keep_;
  const int64_t grid_rows_;  // at most
  const bool rounds_hidden_;
  const at::Tensor positions_, labels_;  // [N]
  const at::TensorOptions options_;      // of the logits
  at::Tensor input_;                     // [N, H] in the type of the products
  at::Tensor scales_;                    // [N], 1 / temperature; undefined for 1
  at::Tensor buffer_;                    // of logits
};

absl::StatusOr<std::unique_ptr<LinearCrossEntropyLoss>> LinearCrossEntropyLoss::Create(
    const ops::MatrixRows& weight, const LinearCrossEntropyOptions& options) {
  TANDEM_RETURN_IF_ERROR(CheckOutputWeight("weight", weight));
  const at::ScalarType logits_type = at::toOpMathType(weight.scalar_type());
  TANDEM_RETURN_IF_ERROR(CheckVocabularyShard(options.vocabulary, weight));
  const VocabularyShard vocabulary = options.vocabulary.WithRows(weight.size(0));
  const int64_t row_bytes =
      vocabulary.most_rows * static_cast<int64_t>(c10::elementSize(logits_type));
  if (options.logits_chunk_bytes < 3 * row_bytes) {
    return InvalidField("logits_chunk_bytes",
                        absl::StrCat("must be at least ", 3 * row_bytes, " for a vocabulary of ",
                                     vocabulary.most_rows));
  }
  if (options.chunk_size < 1) return InvalidField("chunk_size", "must be positive");
  TANDEM_RETURN_IF_ERROR(CheckSoftCap("soft_cap", options.soft_cap));

  std::unique_ptr<LinearCrossEntropyLoss> loss(new LinearCrossEntropyLoss);
  loss->weight_ = weight;
  loss->vocabulary_ = vocabulary;
  loss->soft_cap_ = options.soft_cap;
  loss->buffer_ = options.buffer != nullptr ? options.buffer : std::make_shared<LogitsBuffer>();
  loss->logits_type_ = logits_type;
  loss->ChooseImpl(options.impl);
  loss->PlanMemory(options);
  loss->prefers_recompute_ =
      PrefersRecompute(loss->weight_, loss->impl_, loss->vocabulary_.group.get());
  return loss;
}

void LinearCrossEntropyLoss::ChooseImpl(LossImpl asked_for) {
  const LogitKernels* const own = OwnLogitKernels(weight_.device(), logits_type_);
  impl_ = asked_for;
  reason_ = "asked for";
  if (asked_for == LossImpl::kAuto && own != nullptr) {
    // On an H100, 8,192 rows of 896 and a vocabulary of 151,936: bf16 30.4 ms by rows, 31.9 by
    // tiles, 511 with ATen; float32 152, 159, 431.
    impl_ = weight_.is_cpu() ? LossImpl::kTiles : LossImpl::kRows;
    reason_ = absl::StrCat("the fastest for float32 logits on ", weight_.device().str());
  } else if (asked_for == LossImpl::kAuto) {
    impl_ = LossImpl::kAten;
    reason_ = absl::StrCat("no own kernels for ", c10::toString(logits_type_), " logits on ",
                           weight_.device().str(), " with these settings");
  } else if (own == nullptr && asked_for != LossImpl::kAten) {
    impl_ = LossImpl::kAten;
    is_fallback_ = true;
    reason_ = absl::StrCat("no own kernels for ", c10::toString(logits_type_), " logits on ",
                           weight_.device().str(), " with these settings");
  }
  kernels_ = impl_ == LossImpl::kAten ? &kAtenLogitKernels : own;
  parallel_tiles_ = impl_ == LossImpl::kTiles && weight_.is_cpu();
}

void LinearCrossEntropyLoss::PlanMemory(const LinearCrossEntropyOptions& options) {
  // Ranks exchange statistics chunk by chunk, so that all of them need the same chunks.
  const int64_t most_rows = vocabulary_.most_rows;
  tile_columns_ = most_rows;
  if (impl_ == LossImpl::kTiles) {
    tile_columns_ = std::min(weight_.is_cpu() ? kTileColumns : kGpuTileColumns, most_rows);
  }
  const auto logit_bytes = static_cast<int64_t>(c10::elementSize(logits_type_));
  const auto rows_within = [&](int64_t budget, int64_t columns) {
    const int64_t scratch = kernels_->scratch_bytes(budget / 3);
    return std::clamp<int64_t>((budget - scratch) / (columns * logit_bytes), 1, options.chunk_size);
  };
  // A kept row also has the sums of AddHiddenGradient's splits.
  const int64_t sums = parallel_tiles_ ? (kHiddenSplits - 1) * weight_.size(1) : 0;
  chunk_rows_ = rows_within(options.logits_chunk_bytes, most_rows + sums);
  tile_rows_ = rows_within(options.logits_chunk_bytes / 4, tile_columns_);
}

absl::Status LinearCrossEntropyLoss::CheckRows(const at::Tensor& hidden,
                                               const OutputRows& rows) const {
  TANDEM_RETURN_IF_ERROR(CheckHidden("hidden", hidden, weight_));
  const size_t count = rows.positions.size();
  if (rows.labels.size() != count) {
    return InvalidField("labels", "must have one entry per position");
  }
  TANDEM_RETURN_IF_ERROR(CheckTemperatures(rows.temperatures, count));
  TANDEM_RETURN_IF_ERROR(CheckIndices("labels", rows.labels, vocabulary_.size, "the vocabulary"));
  return CheckIndices("positions", rows.positions, hidden.size(0), "the hidden states");
}

LossMode LinearCrossEntropyLoss::ModeFor(LossMode asked_for, int64_t rows) const {
  if (asked_for != LossMode::kAuto) return asked_for;
  const bool recompute = prefers_recompute_ || chunk_rows_ < std::min(rows, kMinKeptRows);
  return recompute ? LossMode::kRecompute : LossMode::kGradientInForward;
}

absl::Status LinearCrossEntropyLoss::ForwardBackward(const at::Tensor& hidden,
                                                     const OutputRows& rows,
                                                     TokenLossFunction function,
                                                     OutputGradients& gradients, LossMode mode,
                                                     int64_t* num_greatest) {
  const at::NoGradGuard no_grad;
  TANDEM_RETURN_IF_ERROR(CheckRows(hidden, rows));
  if (num_greatest != nullptr) *num_greatest = 0;
  if (rows.positions.empty()) return absl::OkStatus();
  const auto count = static_cast<int64_t>(rows.positions.size());
  const Call call(*this, hidden, rows, ModeFor(mode, count));
  for (int64_t begin = 0; begin < count; begin += call.group_rows()) {
    const int64_t end = std::min(begin + call.group_rows(), count);
    const RowStatistics statistics = call.Statistics(begin, end);
    const RowLogProbs host = loss::LogProbs(statistics);
    std::vector<double> c(host.logprobs.size(), 0.0), e(host.logprobs.size(), 0.0);
    TANDEM_RETURN_IF_ERROR(
        function(begin, host.logprobs, host.entropies, absl::MakeSpan(c), absl::MakeSpan(e)));
    call.Backward(begin, end, statistics, c, e, gradients);
    if (num_greatest != nullptr) *num_greatest += host.num_greatest;
  }
  return absl::OkStatus();
}

absl::StatusOr<RowLogProbs> LinearCrossEntropyLoss::LogProbs(const at::Tensor& hidden,
                                                             const OutputRows& rows) {
  const at::NoGradGuard no_grad;
  TANDEM_RETURN_IF_ERROR(CheckRows(hidden, rows));
  if (rows.positions.empty()) return RowLogProbs{};
  const Call call(*this, hidden, rows, LossMode::kRecompute);
  return loss::LogProbs(call.Statistics(0, static_cast<int64_t>(rows.positions.size())));
}

}  // namespace tandem::loss
