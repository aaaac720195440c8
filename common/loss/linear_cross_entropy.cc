#include "common/loss/linear_cross_entropy.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/loss/output_rows.h"
#include "common/ops/matrix_product.h"
#include "common/ops/ops.h"

namespace tandem::loss {
namespace {

// Columns of a tile: with some hundred rows a matrix product at full speed, and still a few MB.
constexpr int64_t kTileColumns = 2048;
// A GPU wants larger products.
constexpr int64_t kGpuTileColumns = 32768;
// Rows of a cell, and the parts of a grid's other products: what one thread is given. Every part
// packs its factors anew.
constexpr int64_t kCellRows = 256, kWeightSlices = 2, kHiddenParts = 8;
// Chunks of fewer rows spend more time on reading and writing the gradient of the weight than
// computing the logits a second time takes.
constexpr int64_t kFewestKeptRows = 64;

constexpr LossImpl kImpls[] = {LossImpl::kAuto, LossImpl::kCce, LossImpl::kTorchCompile,
                               LossImpl::kPytorch};

// Null where there are none.
const LogitKernels* OwnKernels(at::Device device, at::ScalarType logits_type) {
  if (logits_type != at::kFloat || ops::GetKernelPath() != ops::KernelPath::kAuto) return nullptr;
  if (device.is_cpu()) return &CpuLogitKernels();
#ifdef TANDEM_CUDA
  if (device.is_cuda()) return &CudaLogitKernels();
#endif
  return nullptr;
}

// One wait for the device.
RowLogProbs ToHost(const RowStatistics& rows) {
  const at::Tensor both = at::stack({LogProbs(rows), Entropies(rows)}).to(at::kCPU).contiguous();
  const double* const numbers = both.const_data_ptr<double>();
  const int64_t count = both.size(1);
  return {.logprobs = {numbers, numbers + count},
          .entropies = {numbers + count, numbers + 2 * count}};
}

}  // namespace

OutputRows RowsOfLabels(absl::Span<const int64_t> labels, int64_t shift, int64_t ignore_index) {
  OutputRows rows;
  for (size_t t = 0; t + static_cast<size_t>(shift) < labels.size(); ++t) {
    const int64_t label = labels[t + static_cast<size_t>(shift)];
    if (label == ignore_index) continue;
    rows.positions.push_back(static_cast<int64_t>(t));
    rows.labels.push_back(label);
  }
  return rows;
}

const char* LossImplName(LossImpl impl) {
  switch (impl) {
    case LossImpl::kAuto:
      return "auto";
    case LossImpl::kCce:
      return "cce";
    case LossImpl::kTorchCompile:
      return "torch_compile";
    case LossImpl::kPytorch:
      return "pytorch";
  }
  return "unknown";
}

absl::StatusOr<LossImpl> ParseLossImpl(absl::string_view name) {
  for (const LossImpl impl : kImpls) {
    if (name == LossImplName(impl)) return impl;
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
        grid_rows_(EqualParts(count_, keep_ ? loss.chunk_rows_ : loss.tile_rows_)),
        positions_(ToDevice(rows.positions, loss.weight_.device())),
        labels_(ToDevice(rows.labels, loss.weight_.device())),
        options_(loss.weight_.options().dtype(loss.logits_type_).requires_grad(false)) {
    input_ = SelectRows(hidden, rows.positions, positions_).to(loss.weight_.scalar_type());
    if (!rows.temperatures.empty()) scales_ = ToDevice(rows.temperatures, options_).reciprocal_();
    const int64_t needed = grid_rows_ * (keep_ ? loss.weight_.size(0) : loss.tile_columns_);
    if (!loss.buffer_.defined() || loss.buffer_.numel() < needed) {
      loss.buffer_.reset();  // before there is a larger one
      loss.buffer_ = at::empty({needed}, options_);
    }
  }

  // How many rows Statistics and Backward work on together.
  int64_t group_rows() const { return keep_ ? grid_rows_ : count_; }

  // Of the rows [begin, end). In kGradientInForward their logits stay in the buffer.
  RowStatistics Statistics(int64_t begin, int64_t end) const {
    const RowStatistics parts = EmptyRowStatistics(Tiles(), end - begin, options_);
    ForGrids(begin, end, [&](const Grid& grid) {
      ForCells(grid, [&](const Cell& cell) {
        ComputeLogits(cell);
        loss_.kernels_->Statistics(cell, PartOf(parts, cell.tile, cell.begin - begin, cell.count));
      });
    });
    const RowStatistics own = MergeParts(parts);
    return loss_.group_ == nullptr ? own : MergeRanks(own, *loss_.group_);
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
        const auto part = [&](const at::Tensor& x) {
          return x.narrow(0, cell.begin - begin, cell.count);
        };
        loss_.kernels_->Gradient(cell,
                                 {.max = part(all.max),
                                  .constants = part(all.constants),
                                  .slopes = part(all.slopes),
                                  .at_label = part(all.at_label)},
                                 product_type());
      });
      if (gradients.weight.defined()) AddWeightGradient(grid, gradients.weight);
      if (gradients.bias.defined()) AddBiasGradient(grid, gradients.bias);
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
  // What the buffer holds at a time: some rows, and of those all tiles or one.
  struct Grid {
    int64_t begin, rows;
    int64_t first_tile, tiles;
  };
  // A tile of some rows of a grid.
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
  at::Tensor Weight(int64_t tile) const {
    return loss_.weight_.narrow(0, FirstColumn(tile), Columns(tile));
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
    return loss_.shares_out_ ? EqualParts(grid.rows, kCellRows) : grid.rows;
  }

  // [rows, columns], contiguous: the tiles of a grid lie one after the other.
  at::Tensor Logits(const Grid& grid, int64_t tile) const {
    const int64_t before = grid.rows * (FirstColumn(tile) - FirstColumn(grid.first_tile));
    return loss_.buffer_.narrow(0, before, grid.rows * Columns(tile))
        .view({grid.rows, Columns(tile)});
  }

  // Calls work(i) for [0, count). Tiled logits are shared out among the threads as whole products:
  // waiting for the slowest after every product costs a tenth of the time.
  template <typename Work>
  void ForEach(int64_t count, const Work& work) const {
    if (!loss_.shares_out_) {
      for (int64_t i = 0; i < count; ++i) work(i);
      return;
    }
    at::parallel_for(0, count, /*grain_size=*/1, [&](int64_t begin, int64_t end) {
      const at::NoGradGuard no_grad;  // a setting of this thread
      for (int64_t i = begin; i < end; ++i) work(i);
    });
  }

  void Product(const at::Tensor& product, const at::Tensor& a, const at::Tensor& b,
               bool accumulate) const {
    (loss_.shares_out_ ? ops::MatrixProductOnThread : ops::MatrixProductInto)(product, a, b,
                                                                              accumulate);
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
      cell.first_label = loss_.first_label_ + FirstColumn(cell.tile);
      cell.labels = labels_.narrow(0, cell.begin, cell.count);
      if (scales_.defined()) cell.scales = scales_.narrow(0, cell.begin, cell.count);
      work(cell);
    });
  }

  void ComputeLogits(const Cell& cell) const {
    Product(cell.logits, input_.narrow(0, cell.begin, cell.count), Weight(cell.tile).t(),
            /*accumulate=*/false);
    if (loss_.bias_.defined()) {
      at::Tensor(cell.logits)
          .add_(loss_.bias_.narrow(0, FirstColumn(cell.tile), Columns(cell.tile)));
    }
  }

  // The rows' part of the gradient of their logits.
  RowGradients Coefficients(int64_t begin, int64_t end, const RowStatistics& rows,
                            const std::vector<double>& logprob_coefficients,
                            const std::vector<double>& entropy_coefficients) const {
    at::Tensor c = ToDevice(logprob_coefficients, options_.dtype(at::kDouble));
    at::Tensor e = ToDevice(entropy_coefficients, options_.dtype(at::kDouble));
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
    const int64_t slices = loss_.shares_out_ ? kWeightSlices : 1;
    ForEach(grid.tiles * slices, [&](int64_t index) {
      const int64_t tile = grid.first_tile + index / slices, slice = index % slices;
      const int64_t first = Columns(tile) * slice / slices;
      const int64_t columns = Columns(tile) * (slice + 1) / slices - first;
      const at::Tensor dz = GradientOf(Logits(grid, tile), product_type());
      Product(weight.narrow(0, FirstColumn(tile) + first, columns),
              dz.narrow(1, first, columns).t(), input, /*accumulate=*/true);
    });
  }

  void AddBiasGradient(const Grid& grid, const at::Tensor& bias) const {
    for (int64_t tile = grid.first_tile; tile < grid.first_tile + grid.tiles; ++tile) {
      const at::Tensor dz = GradientOf(Logits(grid, tile), product_type());
      bias.narrow(0, FirstColumn(tile), Columns(tile)).add_(dz.sum(0, false, bias.scalar_type()));
    }
  }

  // `hidden` [rows, H] are those of the grid. Few rows are shared out by the vocabulary too, over
  // which each part has a sum of its own.
  void AddHiddenGradient(const Grid& grid, const at::Tensor& hidden) const {
    const int64_t cell_rows = CellRows(grid);
    const int64_t blocks = (grid.rows + cell_rows - 1) / cell_rows;
    const int64_t parts = loss_.shares_out_ ? std::max<int64_t>(kHiddenParts / blocks, 1) : 1;
    // The first part has its sum in `hidden`.
    const at::Tensor sums =
        at::zeros({parts - 1, hidden.size(0), hidden.size(1)}, hidden.options());
    ForEach(blocks * parts, [&](int64_t index) {
      const int64_t row = index / parts * cell_rows, part = index % parts;
      const int64_t count = std::min(cell_rows, grid.rows - row);
      AddHiddenGradient(grid, row, count, part, parts,
                        (part == 0 ? hidden : sums[part - 1]).narrow(0, row, count));
    });
    for (int64_t part = 1; part < parts; ++part) at::Tensor(hidden).add_(sums[part - 1]);
  }

  // Of `count` rows from `row` on, by one of `parts` parts of the grid's columns.
  void AddHiddenGradient(const Grid& grid, int64_t row, int64_t count, int64_t part, int64_t parts,
                         const at::Tensor& hidden) const {
    const int64_t last_tile = grid.first_tile + grid.tiles - 1;
    const int64_t first = FirstColumn(grid.first_tile);
    const int64_t width = FirstColumn(last_tile) + Columns(last_tile) - first;
    const int64_t begin = first + width * part / parts, end = first + width * (part + 1) / parts;
    for (int64_t tile = grid.first_tile; tile <= last_tile; ++tile) {
      const int64_t from = std::max(begin - FirstColumn(tile), int64_t{0});
      const int64_t columns = std::min(end - FirstColumn(tile), Columns(tile)) - from;
      if (columns <= 0) continue;
      const at::Tensor dz = GradientOf(Logits(grid, tile), product_type());
      Product(hidden, dz.narrow(0, row, count).narrow(1, from, columns),
              Weight(tile).narrow(0, from, columns), /*accumulate=*/true);
    }
  }

  LinearCrossEntropyLoss& loss_;
  const int64_t count_;
  const bool keep_;
  const int64_t grid_rows_;              // at most
  const at::Tensor positions_, labels_;  // [N]
  const at::TensorOptions options_;      // of the logits
  at::Tensor input_;                     // [N, H] in the type of the products
  at::Tensor scales_;                    // [N], 1 / temperature; undefined for 1
};

absl::StatusOr<std::unique_ptr<LinearCrossEntropyLoss>> LinearCrossEntropyLoss::Create(
    at::Tensor weight, at::Tensor bias, const LinearCrossEntropyOptions& options) {
  TANDEM_RETURN_IF_ERROR(CheckOutputWeight("weight", weight));
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != weight.size(0))) {
    return InvalidField("bias", "must be [V]");
  }
  const at::ScalarType logits_type = at::toOpMathType(weight.scalar_type());
  const int64_t row_bytes = weight.size(0) * static_cast<int64_t>(c10::elementSize(logits_type));
  if (options.logits_chunk_bytes < 3 * row_bytes) {
    return InvalidField(
        "logits_chunk_bytes",
        absl::StrCat("must be at least ", 3 * row_bytes, " for a vocabulary of ", weight.size(0)));
  }
  if (options.chunk_size < 1) return InvalidField("chunk_size", "must be positive");

  std::unique_ptr<LinearCrossEntropyLoss> loss(new LinearCrossEntropyLoss);
  loss->weight_ = weight.detach();
  loss->bias_ = bias.defined() ? bias.detach() : bias;
  loss->vocabulary_ = weight.size(0);
  if (options.group != nullptr && options.group->size() > 1) {
    loss->group_ = options.group;
    loss->first_label_ = options.group->rank() * weight.size(0);
    loss->vocabulary_ *= options.group->size();
  }
  loss->logits_type_ = logits_type;
  loss->ChooseImpl(options.impl);
  loss->PlanMemory(options);
  return loss;
}

void LinearCrossEntropyLoss::ChooseImpl(LossImpl asked_for) {
  const LogitKernels* const own = OwnKernels(weight_.device(), logits_type_);
  impl_ = asked_for;
  reason_ = "asked for";
  if (asked_for == LossImpl::kAuto && weight_.is_cpu() && own != nullptr) {
    impl_ = LossImpl::kCce;
    reason_ = "the fastest for float32 logits on the CPU";
  } else if (asked_for == LossImpl::kAuto) {
    impl_ = LossImpl::kPytorch;
    reason_ = absl::StrCat("what is known to be right for ", c10::toString(logits_type_),
                           " logits on ", weight_.device().str());
  } else if (own == nullptr && asked_for != LossImpl::kPytorch) {
    impl_ = LossImpl::kPytorch;
    is_fallback_ = true;
    reason_ = absl::StrCat("no own kernels for ", c10::toString(logits_type_), " logits on ",
                           weight_.device().str(), " with these settings");
  }
  kernels_ = impl_ == LossImpl::kPytorch ? &AtenLogitKernels() : own;
  shares_out_ = impl_ == LossImpl::kCce && weight_.is_cpu();
}

void LinearCrossEntropyLoss::PlanMemory(const LinearCrossEntropyOptions& options) {
  const int64_t vocabulary = weight_.size(0);
  tile_columns_ = vocabulary;
  if (impl_ == LossImpl::kCce) {
    tile_columns_ = std::min(weight_.is_cpu() ? kTileColumns : kGpuTileColumns, vocabulary);
  }
  const auto logit_bytes = static_cast<int64_t>(c10::elementSize(logits_type_));
  const auto rows_within = [&](int64_t budget, int64_t columns) {
    const int64_t scratch = kernels_->ScratchBytes(budget / 3);
    return std::clamp<int64_t>((budget - scratch) / (columns * logit_bytes), 1, options.chunk_size);
  };
  // Of a kept row also its sums over the parts of the vocabulary.
  const int64_t sums = shares_out_ ? (kHiddenParts - 1) * weight_.size(1) : 0;
  chunk_rows_ = rows_within(options.logits_chunk_bytes, vocabulary + sums);
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
  TANDEM_RETURN_IF_ERROR(CheckIndices("labels", rows.labels, vocabulary_, "the vocabulary"));
  return CheckIndices("positions", rows.positions, hidden.size(0), "the hidden states");
}

LossMode LinearCrossEntropyLoss::ModeFor(LossMode asked_for, int64_t rows) const {
  if (asked_for != LossMode::kAuto) return asked_for;
  return chunk_rows_ >= std::min(rows, kFewestKeptRows) ? LossMode::kGradientInForward
                                                        : LossMode::kRecompute;
}

absl::Status LinearCrossEntropyLoss::ForwardBackward(const at::Tensor& hidden,
                                                     const OutputRows& rows,
                                                     TokenLossFunction function,
                                                     OutputGradients& gradients, LossMode mode) {
  const at::NoGradGuard no_grad;
  TANDEM_RETURN_IF_ERROR(CheckRows(hidden, rows));
  if (rows.positions.empty()) return absl::OkStatus();
  const auto count = static_cast<int64_t>(rows.positions.size());
  const Call call(*this, hidden, rows, ModeFor(mode, count));
  for (int64_t begin = 0; begin < count; begin += call.group_rows()) {
    const int64_t end = std::min(begin + call.group_rows(), count);
    const RowStatistics statistics = call.Statistics(begin, end);
    const RowLogProbs host = ToHost(statistics);
    std::vector<double> c(host.logprobs.size(), 0.0), e(host.logprobs.size(), 0.0);
    TANDEM_RETURN_IF_ERROR(
        function(begin, host.logprobs, host.entropies, absl::MakeSpan(c), absl::MakeSpan(e)));
    call.Backward(begin, end, statistics, c, e, gradients);
  }
  return absl::OkStatus();
}

absl::StatusOr<RowLogProbs> LinearCrossEntropyLoss::LogProbs(const at::Tensor& hidden,
                                                             const OutputRows& rows) {
  const at::NoGradGuard no_grad;
  TANDEM_RETURN_IF_ERROR(CheckRows(hidden, rows));
  if (rows.positions.empty()) return RowLogProbs{};
  const Call call(*this, hidden, rows, LossMode::kRecompute);
  return ToHost(call.Statistics(0, static_cast<int64_t>(rows.positions.size())));
}

at::Tensor LinearCrossEntropyLoss::ForwardLogits(const at::Tensor& hidden) const {
  const at::NoGradGuard no_grad;
  TORCH_CHECK_NOT_IMPLEMENTED(group_ == nullptr, "logits of a vocabulary-parallel head");
  at::Tensor logits =
      at::empty({hidden.size(0), weight_.size(0)}, weight_.options().dtype(logits_type_));
  ops::MatrixProductInto(logits, hidden.to(weight_.scalar_type()), weight_.t());
  if (bias_.defined()) logits.add_(bias_);
  return logits;
}

}  // namespace tandem::loss
