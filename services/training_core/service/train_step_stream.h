// A train step as it comes over the wire, which trainer and critic share.
#ifndef TANDEM_SERVICES_TRAINING_CORE_SERVICE_TRAIN_STEP_STREAM_H_
#define TANDEM_SERVICES_TRAINING_CORE_SERVICE_TRAIN_STEP_STREAM_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/base/checksum.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/rpc/calls/byte_budget.h"
#include "common/rpc/calls/stream_handlers.h"

namespace tandem::rpc {

// The engine's field paths as the client knows them: what is not about a sample is in the header.
inline absl::Status WithRequestPath(absl::Status status) {
  const std::optional<std::string> path = FieldPath(status);
  if (!path.has_value() || path->starts_with("samples") || path->starts_with("header")) {
    return status;
  }
  return PrependFieldPath("header", std::move(status));
}

// Collects one step: a header that announces how many samples follow, then the samples, each of
// which may come in several messages. Every sample is checked as it comes, so a bad one is refused
// before the rest is sent.
template <typename Request, typename Response>
class TrainStepStream : public ClientStreamHandler<Request, Response> {
 public:
  // Messages that are held count against `budget` until the call is over.
  explicit TrainStepStream(ByteBudget& budget) : share_(budget) {}

  // What a message is serialised to depends on who serialises it; a client that repeats a step
  // sends the same bytes.
  void OnBytes(const grpc::ByteBuffer& bytes) final {
    const uint64_t size = bytes.Length();  // keeps messages from running into each other
    digest_.Update(&size, sizeof(size));
    std::vector<grpc::Slice> slices;
    if (!bytes.Dump(&slices).ok()) return;  // not a message: it will not be parsed
    for (const grpc::Slice& slice : slices) digest_.Update(slice.begin(), slice.size());
  }

  absl::Status OnMessage(const Request& message) final {
    if (message.has_header()) {
      if (has_header_) return InvalidField("header", "was sent twice");
      absl::StatusOr<int64_t> announced = OnHeader(message.header());
      if (!announced.ok()) return PrependFieldPath("header", announced.status());
      num_samples_ = *announced;
      has_header_ = true;
      return absl::OkStatus();
    }
    if (!has_header_) return InvalidField("header", "must be the first message");
    if (received_ == num_samples_) {
      return InvalidField(
          "header.num_samples",
          absl::StrCat(num_samples_, " samples were announced, but more were sent"));
    }
    const absl::StatusOr<bool> whole = Keep(message);
    if (!whole.ok()) {
      return PrependFieldPath(absl::StrCat("samples[", received_, "]"), whole.status());
    }
    if (*whole) ++received_;
    return absl::OkStatus();
  }

  absl::StatusOr<Response> OnEnd(const CallScope& context) final {
    if (!has_header_) return InvalidField("header", "is required");
    if (received_ != num_samples_) {
      return InvalidField(
          "header.num_samples",
          absl::StrCat(num_samples_, " samples were announced, but only ", received_, " arrived"));
    }
    return OnComplete(digest_.Hex(), context);
  }

 private:
  using Header = std::decay_t<decltype(std::declval<Request>().header())>;

  // Returns how many samples the header announces. Field paths start inside the header.
  virtual absl::StatusOr<int64_t> OnHeader(const Header& header) = 0;
  // Returns whether the sample is whole; else more of it follows. Field paths start inside the
  // sample.
  virtual absl::StatusOr<bool> OnSample(const Request& message) = 0;
  // All samples came. `payload_digest` is the XXH3-128 of the bytes of every message: two steps
  // with the same digest ask for the same.
  virtual absl::StatusOr<Response> OnComplete(std::string payload_digest,
                                              const CallScope& context) = 0;

  absl::StatusOr<bool> Keep(const Request& message) {
    TANDEM_RETURN_IF_ERROR(share_.Take(static_cast<int64_t>(message.SpaceUsedLong())));
    return OnSample(message);
  }

  ByteBudget::Share share_;
  Checksum digest_;
  bool has_header_ = false;
  int64_t num_samples_ = 0;
  int64_t received_ = 0;
};

}  // namespace tandem::rpc

#endif  // TANDEM_SERVICES_TRAINING_CORE_SERVICE_TRAIN_STEP_STREAM_H_
