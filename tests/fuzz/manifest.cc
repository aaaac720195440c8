// Fuzz target: manifest.json of a checkpoint that holds one file, "weights".
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "common/checkpoint/checkpoint.h"
#include "tests/fuzz/fuzz_target.h"

namespace {

namespace fs = std::filesystem;

// A temporary folder that is removed when the process exits.
struct Checkpoint {
  Checkpoint() {
    std::string name = (fs::temp_directory_path() / "manifest-XXXXXX").string();
    tandem::fuzz::Require(mkdtemp(name.data()) != nullptr, "a temporary folder can be made");
    parent = name;
    directory = parent / "checkpoint";
    fs::create_directory(directory);
    std::ofstream(directory / "weights") << "weights\n";
  }
  ~Checkpoint() {
    std::error_code ignored;
    fs::remove_all(parent, ignored);
  }
  fs::path parent, directory;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using tandem::fuzz::Require;
  namespace checkpoint = tandem::checkpoint;
  static const Checkpoint here;
  std::ofstream(here.directory / checkpoint::kManifestFile, std::ios::binary)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));

  const absl::Status verified = checkpoint::Verify(here.directory.string());
  if (!verified.ok()) tandem::fuzz::RequireRefusal(verified);
  const auto listed = checkpoint::List(here.parent.string());
  Require(!verified.ok() || listed.size() == 1, "a verified checkpoint is listed");
  Require(fs::exists(here.directory / "weights"), "reading removes nothing");
  return 0;
}
