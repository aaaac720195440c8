// For tests: kinds of tiny models, which every layout must train as one process does.
#ifndef TANDEM_COMMON_PARALLEL_TESTING_TINY_KINDS_H_
#define TANDEM_COMMON_PARALLEL_TESTING_TINY_KINDS_H_

#include <string>
#include <vector>

#include "common/model/model.h"

namespace tandem::parallel {

struct TinyKind {
  const char* family = "llama";
  bool tied = false, critic = false;
};

// Three of each family.
inline std::vector<TinyKind> EveryTinyKind() {
  return {{"llama", false, false},       {"llama", true, false},       {"llama", true, true},
          {"mistral", false, false},     {"mistral", true, false},     {"mistral", false, true},
          {"qwen2", false, false},       {"qwen2", true, false},       {"qwen2", false, true},
          {"qwen3", false, false},       {"qwen3", true, false},       {"qwen3", true, true},
          {"olmo2", false, false},       {"olmo2", true, false},       {"olmo2", false, true},
          {"deepseek_v3", false, false}, {"deepseek_v3", true, false}, {"deepseek_v3", false, true},
          {"gemma3_text", false, false}, {"gemma3_text", true, false}, {"gemma3_text", true, true},
          {"mixtral", false, false},     {"mixtral", true, false},     {"mixtral", false, true},
          {"qwen2_moe", false, false},   {"qwen2_moe", true, false},   {"qwen2_moe", false, true},
          {"qwen3_moe", false, false},   {"qwen3_moe", true, false},   {"qwen3_moe", false, true},
          {"phi3", false, false},        {"phi3", true, false},        {"phi3", false, true},
          {"gemma2", false, false},      {"gemma2", true, false},      {"gemma2", true, true},
          {"qwen2_vl", false, false},    {"qwen2_vl", true, false},    {"qwen2_vl", false, true},
          {"qwen2_5_vl", false, false},  {"qwen2_5_vl", true, false},  {"qwen2_5_vl", false, true}};
}

// Returns a kind of each family, one after the other the first, the second and the third that it
// has.
inline std::vector<TinyKind> OneKindOfEachFamily() {
  const std::vector<TinyKind> every = EveryTinyKind();
  std::vector<TinyKind> kinds;
  for (size_t family = 0; 3 * family < every.size(); ++family) {
    kinds.push_back(every[3 * family + family % 3]);
  }
  return kinds;
}

// Kinds with experts.
inline std::vector<TinyKind> ExpertKinds() {
  return {{"mixtral", false, false},
          {"qwen2_moe", true, false},
          {"qwen3_moe", false, false},
          {"qwen3_moe", false, true},
          {"deepseek_v3", false, false}};
}

inline std::string NameOf(const TinyKind& kind) {
  return std::string(kind.family) + (kind.tied ? "_tied" : "") + (kind.critic ? "_critic" : "");
}

inline LoadOptions LoadOf(const TinyKind& kind) {
  return {.head = kind.critic ? HeadKind::kValue : HeadKind::kLm,
          .untie_embeddings = kind.critic,
          .num_token_ids = 59};  // and two padding rows
}

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_TESTING_TINY_KINDS_H_
