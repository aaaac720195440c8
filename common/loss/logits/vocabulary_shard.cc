#include "common/loss/logits/vocabulary_shard.h"

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"

namespace tandem::loss {

absl::Status CheckVocabularyShard(const VocabularyShard& shard, const ops::MatrixRows& weight) {
  const int64_t rows = weight.size(0);
  if (shard.is_whole()) return absl::OkStatus();
  if (rows < 1 || rows > shard.most_rows || shard.first < 0 || shard.first + rows > shard.size) {
    return InvalidField(
        "vocabulary",
        absl::StrCat("rows [", shard.first, ", ", shard.first + rows, ") do not fit ", shard.size,
                     " token ids with at most ", shard.most_rows, " on a rank"));
  }
  return absl::OkStatus();
}

}  // namespace tandem::loss
