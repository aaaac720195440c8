// Fuzz target: the JSON header of a safetensors file.
#include "common/tensor/safetensors/safetensors_header.h"

#include "absl/strings/string_view.h"
#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using tandem::fuzz::Require;
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const auto header = tandem::ParseSafetensorsHeader(text, "model.safetensors");
  if (!header.ok()) {
    tandem::fuzz::RequireRefusal(header.status());
    return 0;
  }
  uint64_t end = 0;
  for (const tandem::SafetensorsEntry& entry : header->entries) {
    Require(entry.begin == end && entry.end >= end, "tensors lie back to back");
    end = entry.end;
    uint64_t bytes = tandem::ItemSizeBytes(entry.dtype);
    for (const int64_t extent : entry.shape) {
      Require(extent >= 0, "no extent is negative");
      bytes *= static_cast<uint64_t>(extent);
    }
    Require(bytes == entry.end - entry.begin, "a tensor has the bytes of its shape");
  }
  return 0;
}
