// The parameters of a family, declared block by block. No torch.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_PARAMETER_LIST_H_
#define TANDEM_COMMON_MODEL_FAMILIES_PARAMETER_LIST_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/model/config/parameter_spec.h"

namespace tandem {

class ParameterList {
 public:
  // `hidden_size` is the width of the residual; weights of norms start as `norm_init`.
  explicit ParameterList(int64_t hidden_size, Init norm_init = Init::kOnes)
      : hidden_(hidden_size), norm_init_(norm_init) {}

  // Declares the token embedding, in block 0.
  void Embedding(int64_t vocab_size) {
    specs_.push_back({.name = kEmbeddingName, .shape = {vocab_size, hidden_}, .shard_axis = 0});
  }

  // Starts `block`, to which the next declarations belong; blocks are in ascending order.
  void StartBlock(int64_t block) { block_ = block; }

  // The maps that are declared from here to EndExperts, or to the next expert, are of `expert`.
  void StartExpert(const ExpertOfLayer& expert) { expert_ = expert; }
  void EndExperts() { expert_.reset(); }

  // Declares a linear map from the residual to `out` columns, which shards divide; a shard has the
  // bias of its columns.
  void ColumnParallel(const std::string& name, int64_t out, bool bias) {
    specs_.push_back({.name = name + ".weight",
                      .shape = {out, hidden_},
                      .shard_axis = 0,
                      .block = block_,
                      .expert = expert_});
    if (bias) {
      specs_.push_back({.name = name + ".bias",
                        .shape = {out},
                        .init = Init::kZeros,
                        .shard_axis = 0,
                        .block = block_,
                        .expert = expert_});
    }
  }

  // Declares a linear map without bias from `in` values to `out` columns, which shards divide.
  // `stays_dense`: see ParameterSpec.
  void ColumnParallelFrom(const std::string& name, int64_t in, int64_t out,
                          bool stays_dense = false) {
    specs_.push_back({.name = name + ".weight",
                      .shape = {out, in},
                      .shard_axis = 0,
                      .block = block_,
                      .stays_dense = stays_dense});
  }

  // Declares a linear map from the residual to `out` columns, which every shard holds whole.
  void Whole(const std::string& name, int64_t out, bool bias = false) {
    specs_.push_back({.name = name + ".weight", .shape = {out, hidden_}, .block = block_});
    if (bias) {
      specs_.push_back(
          {.name = name + ".bias", .shape = {out}, .init = Init::kZeros, .block = block_});
    }
  }

  // Declares a linear map to the residual, whose input shards divide. The bias is added once, after
  // the partial sums, and is whole on every shard.
  void RowParallel(const std::string& name, int64_t in, bool bias) {
    specs_.push_back({.name = name + ".weight",
                      .shape = {hidden_, in},
                      .shard_axis = 1,
                      .block = block_,
                      .expert = expert_});
    if (bias) {
      specs_.push_back({.name = name + ".bias",
                        .shape = {hidden_},
                        .init = Init::kZeros,
                        .block = block_,
                        .expert = expert_});
    }
  }

  // Declares `width` numbers that no gradient changes, 0 at first and whole on every shard.
  void Buffer(const std::string& name, int64_t width) {
    specs_.push_back(
        {.name = name, .shape = {width}, .init = Init::kZeros, .block = block_, .trains = false});
  }

  // Declares the weight of a norm over `width` values.
  void Norm(const std::string& name, int64_t width,
            std::optional<int64_t> shard_axis = std::nullopt) {
    specs_.push_back({.name = name + ".weight",
                      .shape = {width},
                      .init = norm_init_,
                      .shard_axis = shard_axis,
                      .block = block_});
  }

  // Declares a parameter that every shard holds whole.
  void WholeTensor(const std::string& name, std::vector<int64_t> shape, Init init = Init::kNormal) {
    specs_.push_back(
        {.name = name, .shape = std::move(shape), .init = init, .shard_axis = {}, .block = block_});
  }

  std::vector<ParameterSpec> Take() { return std::move(specs_); }

 private:
  const int64_t hidden_;
  const Init norm_init_;
  int64_t block_ = 0;
  std::optional<ExpertOfLayer> expert_ = std::nullopt;
  std::vector<ParameterSpec> specs_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_PARAMETER_LIST_H_
