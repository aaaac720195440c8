// For tests: speculators in float64, written from the formulas with plain loops.
#ifndef TANDEM_COMMON_SPECULATOR_TESTING_ORACLE_H_
#define TANDEM_COMMON_SPECULATOR_TESTING_ORACLE_H_

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "common/speculator/speculator.h"

namespace tandem::speculator {

using Numbers = std::vector<double>;

// [rows, columns]; a vector has one column.
struct Matrix {
  size_t rows = 0, columns = 0;
  Numbers values;

  double at(size_t row, size_t column) const { return values[row * columns + column]; }
};

inline Matrix ToMatrix(const at::Tensor& tensor) {
  const at::Tensor copy = tensor.detach().to(at::kDouble).cpu().contiguous();
  const double* const values = copy.const_data_ptr<double>();
  return {.rows = static_cast<size_t>(copy.size(0)),
          .columns = copy.dim() > 1 ? static_cast<size_t>(copy.size(1)) : 1,
          .values = {values, values + copy.numel()}};
}

class Oracle {
 public:
  // Copies the parameters, under all of their names in files.
  explicit Oracle(const Speculator& speculator)
      : config_(speculator.config()),
        steps_(speculator.sizes().n_predict),
        width_(speculator.sizes().state_size),
        num_token_ids_(static_cast<size_t>(speculator.num_token_ids())) {
    for (const SpeculatorParameter& parameter : speculator.parameters()) {
      const Matrix matrix = ToMatrix(parameter.value);
      weights_[parameter.spec.name] = matrix;
      for (const std::string& name : parameter.repeats) weights_[name] = matrix;
    }
  }

  // One row: the hidden state, and the token of each step. Returns the logits of each step.
  std::vector<Numbers> Logits(const Numbers& hidden, const std::vector<int64_t>& tokens) const {
    std::vector<Numbers> logits;
    Run(
        hidden,
        [&](int64_t step, const Numbers& of_step) {
          logits.push_back(of_step);
          return static_cast<size_t>(step + 1) < tokens.size()
                     ? tokens[static_cast<size_t>(step + 1)]
                     : int64_t{-1};
        },
        tokens.front());
    return logits;
  }

  std::vector<int64_t> Draft(const Numbers& hidden, int64_t token, int64_t count) const {
    std::vector<int64_t> drafts;
    Run(
        hidden,
        [&](int64_t, const Numbers& of_step) {
          drafts.push_back(Argmax(of_step));
          return static_cast<int64_t>(drafts.size()) < count ? drafts.back() : int64_t{-1};
        },
        token);
    return drafts;
  }

  // The lowest index of the greatest number.
  static int64_t Argmax(const Numbers& numbers) {
    return std::max_element(numbers.begin(), numbers.end()) - numbers.begin();
  }

 private:
  const Matrix& W(const std::string& name) const { return weights_.at(name); }
  static std::string Str(int64_t number) { return std::to_string(number); }
  bool Flag(const char* key) const { return config_.value(key, false); }

  static Numbers Times(const Matrix& w, const Numbers& x) {
    Numbers y(w.rows, 0.0);
    for (size_t row = 0; row < w.rows; ++row) {
      for (size_t column = 0; column < w.columns; ++column) y[row] += w.at(row, column) * x[column];
    }
    return y;
  }
  static Numbers Norm(const Numbers& x) {
    double squares = 0;
    for (const double value : x) squares += value * value;
    Numbers y = x;
    for (double& value : y) value /= std::sqrt(squares / static_cast<double>(x.size()) + 1e-6);
    return y;
  }
  Numbers Norm(const Numbers& x, const std::string& name) const {
    Numbers y = Norm(x);
    for (size_t j = 0; j < y.size(); ++j) {
      y[j] = y[j] * W(name + ".weight").values[j] + W(name + ".bias").values[j];
    }
    return y;
  }
  static Numbers Gelu(Numbers x) {
    for (double& value : x) value *= 0.5 * std::erfc(-value / std::sqrt(2.0));
    return x;
  }
  static Numbers Sigmoid(Numbers x) {
    for (double& value : x) value = 1 / (1 + std::exp(-value));
    return x;
  }
  // projection x + (e / s) embedding[token]
  Numbers Add(const Matrix& projection, const Numbers& x, const Matrix& embedding,
              int64_t token) const {
    const double s = std::pow(0.5, 0.5 / static_cast<double>(steps_));
    const double e = std::sqrt((1 - s * s) * static_cast<double>(width_) / 2);
    Numbers sum = Times(projection, x);
    for (size_t j = 0; j < sum.size(); ++j) {
      sum[j] += e / s * embedding.at(static_cast<size_t>(token), j);
    }
    return sum;
  }

  // Calls next(step, logits) after each step for the token of the next one, until that is -1.
  template <typename Next>
  void Run(const Numbers& hidden, const Next& next, int64_t token) const {
    Numbers state = hidden;
    if (Flag("scale_input")) {
      state = Norm(state);
      for (double& value : state) value /= std::sqrt(2.0);
    }
    Numbers cell(static_cast<size_t>(width_), 0.0);
    for (int64_t step = 0; token >= 0; ++step) {
      state = Step(step, state, token, cell);
      Numbers logits = Times(W("head." + Str(step) + ".weight"), state);
      logits.resize(num_token_ids_);
      token = next(step, logits);
    }
  }

  Numbers Step(int64_t step, const Numbers& state, int64_t token, Numbers& cell) const {
    if (!config_.contains("method")) {
      const std::string i = Str(step);
      return Gelu(Norm(Add(W("proj." + i + ".weight"), state, W("emb." + i + ".weight"), token),
                       "ln." + i));
    }
    const bool tied = Flag("tie_weights");
    if (config_["method"] == "sum_rnn") {
      const std::string i = Str(tied ? 0 : step), p = Str(tied && step > 1 ? 1 : step);
      return Gelu(Norm(Add(W("proj." + p + ".0.weight"), state, W("emb." + i + ".0.weight"), token),
                       "ln." + i + ".0"));
    }
    const std::string p = step == 0 ? "0" : "1";
    const auto gate = [&](const std::string& name) {
      return Add(W(name + "_proj." + p + ".weight"), state, W(name + "_emb.0.weight"), token);
    };
    const Numbers f = Sigmoid(gate("forget")), i = Sigmoid(gate("input"));
    const Numbers o = Sigmoid(gate("output")), g = Gelu(Norm(gate("cell"), "cell_ln.0"));
    for (size_t j = 0; j < cell.size(); ++j) cell[j] = cell[j] * f[j] + g[j] * i[j];
    Numbers result = Gelu(Norm(cell, "state_ln.0"));
    for (size_t j = 0; j < cell.size(); ++j) result[j] *= o[j];
    return result;
  }

  const nlohmann::json config_;
  const int64_t steps_, width_;
  const size_t num_token_ids_;
  std::map<std::string, Matrix> weights_;
};

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_TESTING_ORACLE_H_
