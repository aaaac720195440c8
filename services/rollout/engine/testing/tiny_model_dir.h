// Hugging Face directories of tiny random models, in a temporary folder.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_TINY_MODEL_DIR_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_TINY_MODEL_DIR_H_

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "common/model/test_models.h"

namespace tandem::rollout {

// Removed with everything in it when it goes out of scope.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = std::filesystem::temp_directory_path() / "tandem_rollout_XXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// A byte-level vocabulary of `size` tokens: <unk>, <s>, </s> (special), then words with and without
// a leading space; every eighth ends with a blank line.
inline nlohmann::json TinyTokenizerJson(int size) {
  nlohmann::json vocab = nlohmann::json::object();
  nlohmann::json added = nlohmann::json::array();
  const char* specials[] = {"<unk>", "<s>", "</s>"};
  for (int id = 0; id < size; ++id) {
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

// Writes a tiny model with weights from `seed` into `directory`; `changes` are merged into its
// config.
inline void WriteTinyModel(const std::string& directory, uint64_t seed,
                           const nlohmann::json& changes = nlohmann::json::object()) {
  std::filesystem::create_directories(directory);
  const auto model = TinyModel("llama", changes, {}, seed);
  const absl::Status saved = model->Save(directory);
  if (!saved.ok()) std::abort();
  std::ofstream(directory + "/tokenizer.json")
      << TinyTokenizerJson(static_cast<int>(model->config().vocab_size)).dump();
}

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_TINY_MODEL_DIR_H_
