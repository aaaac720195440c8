// Hugging Face directories of tiny random models, for tests of what loads them.
#ifndef TANDEM_COMMON_MODEL_TESTING_TINY_MODEL_DIR_H_
#define TANDEM_COMMON_MODEL_TESTING_TINY_MODEL_DIR_H_

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "common/model/testing/models.h"

namespace tandem {

// Removed with everything in it when it goes out of scope.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = std::filesystem::temp_directory_path() / "tandem_test_XXXXXX";
    if (mkdtemp(pattern.data()) == nullptr) std::abort();
    path_ = pattern;
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Writes a tiny model with weights from `seed` into `directory` (no tokenizer); `changes` are
// merged into its config. Aborts on an error.
inline void WriteTinyModel(const std::string& directory, uint64_t seed,
                           const nlohmann::json& changes = nlohmann::json::object(),
                           const std::string& model_type = "llama") {
  if (!TinyModel(model_type, changes, {}, seed)->Save(directory).ok()) std::abort();
}

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_TESTING_TINY_MODEL_DIR_H_
