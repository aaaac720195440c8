// Fuzz target: tokenizer.json of a model.
#include "absl/strings/string_view.h"
#include "common/coauthoring/vocabulary.h"
#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using tandem::fuzz::Require;
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const auto vocabulary = tandem::Vocabulary::Parse(text);
  if (!vocabulary.ok()) {
    tandem::fuzz::RequireRefusal(vocabulary.status());
    return 0;
  }
  Require(vocabulary->size() > 0, "a vocabulary has entries");
  for (int32_t id = 0; id < vocabulary->size(); ++id) vocabulary->Decode(id);
  const tandem::BoundarySets boundaries(*vocabulary, {});
  for (const int32_t id : boundaries.sentence().ids()) {
    Require(id >= 0 && id < vocabulary->size(), "a boundary is an id of the vocabulary");
  }
  Require(tandem::Vocabulary::CheckSame(*vocabulary, *vocabulary).ok(),
          "a vocabulary equals itself");
  return 0;
}
