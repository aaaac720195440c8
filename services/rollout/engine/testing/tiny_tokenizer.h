// Tiny models with a tokenizer, for tests.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_TINY_TOKENIZER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_TINY_TOKENIZER_H_

#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "common/model/testing/tiny_model_dir.h"

namespace tandem::rollout {

constexpr int kTinyVocabulary = 61;  // of the tiny models, unless they say otherwise

// A byte-level vocabulary: <unk>, <s>, </s> (special), then words with and without a leading space;
// every eighth ends with a blank line.
inline nlohmann::json TinyTokenizerJson(int vocabulary = kTinyVocabulary) {
  nlohmann::json vocab = nlohmann::json::object();
  nlohmann::json added = nlohmann::json::array();
  const char* specials[] = {"<unk>", "<s>", "</s>"};
  for (int id = 0; id < vocabulary; ++id) {
    if (id < 3) {
      vocab[specials[id]] = id;
      added.push_back({{"id", id}, {"content", specials[id]}, {"special", true}});
      continue;
    }
    std::string piece = (id % 3 == 0 ? "\u0120w" : "w") + std::to_string(id);
    if (id % 8 == 0) piece += "\u010A\u010A";
    vocab[piece] = id;
  }
  return {{"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", nlohmann::json::array()}}},
          {"added_tokens", added},
          {"decoder", {{"type", "ByteLevel"}}}};
}

// Calls WriteTinyModel, and writes the tokenizer beside the model.
inline void WriteTinyModelAndTokenizer(const std::string& directory, uint64_t seed,
                                       const nlohmann::json& changes = nlohmann::json::object(),
                                       const std::string& model_type = "llama") {
  WriteTinyModel(directory, seed, changes, model_type);
  const int vocabulary =
      changes.is_object() ? changes.value("vocab_size", kTinyVocabulary) : kTinyVocabulary;
  std::ofstream(directory + "/tokenizer.json") << TinyTokenizerJson(vocabulary).dump();
}

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_TINY_TOKENIZER_H_
