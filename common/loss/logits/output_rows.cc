#include "common/loss/logits/output_rows.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/not_finite.h"
#include "common/ops/products/matrix_product.h"

namespace tandem::loss {

absl::Status CheckOutputWeight(absl::string_view name, const ops::MatrixRows& weight) {
  const bool is_matrix = weight.defined() && weight.dim() == 2;
  // Rows of ops::Bfloat16Rows begin at even distances.
  const auto is_padded = [&] {
    return weight.scalar_type() == at::kBFloat16 && weight.is_cpu() &&
           weight.dense().stride(1) == 1 && weight.dense().stride(0) == weight.size(1) + 1;
  };
  if (!is_matrix || !(weight.is_contiguous() || is_padded())) {
    return InvalidField(name, "must be a contiguous [V, H] matrix");
  }
  const at::ScalarType type = weight.scalar_type();
  if (type != at::kFloat && type != at::kDouble && type != at::kBFloat16) {
    return FieldError(absl::StatusCode::kUnimplemented, name,
                      "only float32, float64 and bfloat16 output layers are supported yet");
  }
  return absl::OkStatus();
}

absl::Status CheckHidden(absl::string_view name, const at::Tensor& hidden,
                         const ops::MatrixRows& weight) {
  if (hidden.dim() != 2 || hidden.size(1) != weight.size(1)) {
    return InvalidField(name, "must be [T, H] with the H of the output layer");
  }
  const at::ScalarType type = hidden.scalar_type(), of_weight = weight.scalar_type();
  if (type != of_weight && !(type == at::kBFloat16 && of_weight == at::kFloat) &&
      !RoundsHidden(hidden, weight)) {
    return InvalidField(name, "must have the type of the output layer, or bfloat16");
  }
  return absl::OkStatus();
}

bool RoundsHidden(const at::Tensor& hidden, const ops::MatrixRows& weight) {
  return weight.is_cpu() && weight.scalar_type() == at::kBFloat16 &&
         hidden.scalar_type() == at::kFloat;
}

absl::Status CheckIndices(absl::string_view name, absl::Span<const int64_t> indices, int64_t end,
                          absl::string_view outside) {
  for (size_t i = 0; i < indices.size(); ++i) {
    if (indices[i] < 0 || indices[i] >= end) {
      return InvalidField(absl::StrCat(name, "[", i, "]"),
                          absl::StrCat(indices[i], " is outside ", outside));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSoftCap(absl::string_view name, std::optional<double> soft_cap) {
  if (!soft_cap.has_value() || (*soft_cap > 0 && std::isfinite(*soft_cap))) return absl::OkStatus();
  return InvalidField(name, "must be positive and finite");
}

absl::Status CheckTemperatures(absl::Span<const double> temperatures, size_t rows) {
  if (!temperatures.empty() && temperatures.size() != rows) {
    return InvalidField("temperatures", "must be empty or have one entry per position");
  }
  for (const double temperature : temperatures) {
    if (!(temperature > 0)) return InvalidField("temperatures", "must be positive");
  }
  return absl::OkStatus();
}

absl::Status CheckScales(absl::Span<const double> scales, size_t rows) {
  if (scales.size() != rows) return InvalidField("scales", "must have one entry per position");
  for (const double scale : scales) {
    if (!std::isfinite(scale)) return InvalidField("scales", "must be finite");
  }
  return absl::OkStatus();
}

at::Tensor SelectRows(const at::Tensor& hidden, absl::Span<const int64_t> positions,
                      const at::Tensor& indices) {
  bool all = static_cast<int64_t>(positions.size()) == hidden.size(0);
  for (size_t i = 0; i < positions.size() && all; ++i) {
    all = positions[i] == static_cast<int64_t>(i);
  }
  return all ? hidden : hidden.index_select(0, indices);
}

absl::Status AppendDivergences(const at::Tensor& numbers, int64_t first,
                               std::initializer_list<std::vector<double>*> to) {
  const at::Tensor host = numbers.to(at::kCPU).contiguous();
  const int64_t rows = host.size(-1);
  const double* own = host.const_data_ptr<double>();
  for (int64_t row = 0; row < rows; ++row) {
    if (std::isfinite(own[row])) continue;
    return NotFiniteError(absl::StrCat("the divergence of row ", first + row, " is not finite"));
  }
  for (std::vector<double>* const all : to) {
    all->insert(all->end(), own, own + rows);
    own += rows;
  }
  return absl::OkStatus();
}

void AddOutputGradients(const at::Tensor& dz, const at::Tensor& input,
                        const ops::MatrixRows& weight, const at::Tensor& positions,
                        OutputGradients& gradients) {
  if (gradients.weight.defined()) {
    ops::MatrixProductInto(gradients.weight, dz.t(), input, /*accumulate=*/true);
  }
  if (gradients.hidden.defined()) {
    const at::Tensor of_hidden =
        at::empty(input.sizes(), input.options().dtype(at::toOpMathType(weight.scalar_type())));
    weight.InputGradientInto(of_hidden, dz, /*accumulate=*/false);
    gradients.hidden.index_add_(0, positions, of_hidden.to(gradients.hidden.scalar_type()));
  }
}

int64_t EqualChunkRows(int64_t count, int64_t max_rows) {
  const int64_t chunks = (count + max_rows - 1) / max_rows;
  return (count + chunks - 1) / chunks;
}

}  // namespace tandem::loss
