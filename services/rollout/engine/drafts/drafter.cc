#include "services/rollout/engine/drafts/drafter.h"

#include "services/rollout/engine/drafts/ngram_drafter.h"

namespace tandem::rollout {

std::unique_ptr<Drafter> MakeDrafter(const SpeculativeParams& params) {
  if (params.method != SpeculativeMethod::kNgram) return nullptr;
  return std::make_unique<NgramDrafter>(params.prompt_lookup_min, params.prompt_lookup_max);
}

}  // namespace tandem::rollout
