// Weights from the GPU of one process to that of another one, with two processes.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/aten/peer_memory.h"
#include "common/weights/gpu_copy.h"
#include "common/weights/gpu_intake.h"
#include "common/weights/staged_weight_receiver.h"
#include "common/weights/weight_snapshot.h"
#include "common/weights/weights_digest.h"
#include "tests/gpu/simulated/counts.h"

namespace tandem::simulated_gpu {
namespace {

const at::Device kGpu(at::kCUDA, 0), kOtherGpu(at::kCUDA, 1);
const GpuPlace kPlace = {.device = kGpu, .most_bytes = 1000};

// "a" has an odd number of bfloat16, behind which the others begin at uneven words.
const std::vector<WeightSpec> kSpecs = {{.name = "a", .dtype = DType::kBFloat16, .shape = {3}},
                                        {.name = "b", .shape = {2, 3}},
                                        {.name = "c", .dtype = DType::kBFloat16, .shape = {4}},
                                        {.name = "speculator.h", .shape = {2}}};

NamedTensors Weights() {
  const auto values = [](double from, at::IntArrayRef shape) {
    return (at::arange(c10::multiply_integers(shape), at::kFloat).div(7) + from)
        .view(shape)
        .to(kGpu);
  };
  return {{"a", values(1, {3})},
          {"b", values(2, {2, 3})},
          {"c", values(3, {4})},
          {"speculator.h", values(4, {2})}};
}

std::string ModelDigest(NamedTensors tensors) {
  tensors.pop_back();
  return WeightsDigest(tensors);
}

absl::StatusOr<std::shared_ptr<const WeightSource>> Snapshot(
    const NamedTensors& tensors, const std::optional<GpuPlace>& gpu = kPlace) {
  return MakeWeightSnapshot(
      kSpecs, SourceOf(tensors), {.version = 3, .digest = ModelDigest(tensors)},
      /*num_token_ids=*/7,
      {{.name = kSpeculatorComponent, .config = "{}", .digest = WeightsDigest({tensors.back()})}},
      /*adapter=*/"", gpu);
}

// Runs a test of this program that only such calls run, with `memory` in its environment, as
// another process.
pid_t Start(const std::string& test, const GpuMemory& memory) {
  const std::map<std::string, std::string> variables = {
      {"TANDEM_PEER_MACHINE", memory.machine},
      {"TANDEM_PEER_HANDLE", memory.handle},
      {"TANDEM_PEER_OFFSET", std::to_string(memory.offset)},
      {"TANDEM_PEER_SIZE", std::to_string(memory.size)}};
  for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  std::string program = "transfer_test", filter = "--gtest_filter=OtherProcess.DISABLED_" + test,
              all = "--gtest_also_run_disabled_tests";
  char* const arguments[] = {program.data(), filter.data(), all.data(), nullptr};
  pid_t child = 0;
  EXPECT_EQ(::posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments, environ), 0);
  return child;
}

// Whether such a test passes.
bool PassesInAnotherProcess(const std::string& test, const GpuMemory& memory) {
  const pid_t child = Start(test, memory);
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status == 0;
}

GpuMemory MemoryOfEnvironment() {
  return {.machine = std::getenv("TANDEM_PEER_MACHINE"),
          .handle = std::getenv("TANDEM_PEER_HANDLE"),
          .offset = std::atoll(std::getenv("TANDEM_PEER_OFFSET")),
          .size = std::atoll(std::getenv("TANDEM_PEER_SIZE"))};
}

// The engine's part of an update, on the GPU that is not the sender's.
class IntakeWeights final : public NextWeights {
 public:
  explicit IntakeWeights(std::map<std::string, at::Tensor>& applied)
      : applied_(applied),
        intake_(c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(kOtherGpu)) {}

  absl::Status Add(const WeightSpec& spec, TensorBytes) override {
    return absl::InternalError("\"" + spec.name + "\" came over the host");
  }
  absl::Status AddShared(const WeightSpec& spec, absl::Span<const SharedRange> ranges) override {
    EXPECT_EQ(ranges.size(), 1U) << "chunks that follow one another are copied at once";
    const int64_t before = TheCounts().synchronizations;
    // As new weights are, whose memory was that of others.
    const at::Tensor packed = taken_[spec.name] =
        at::zeros(spec.shape, at::device(kOtherGpu).dtype(ToScalarType(spec.dtype)));
    const absl::Status taken = intake_.Take(spec, ranges, [&](const at::Tensor& tensor) {
      packed.copy_(tensor);
      return absl::OkStatus();
    });
    EXPECT_EQ(TheCounts().synchronizations, before) << "the host does not wait for a tensor";
    return taken;
  }
  absl::StatusOr<std::vector<ReadTensor>> TakeRead() override { return intake_.TakeRead(); }
  absl::Status Apply(const WeightManifest&, const CallScope&) override {
    applied_ = taken_;
    return absl::OkStatus();
  }

 private:
  std::map<std::string, at::Tensor>& applied_;
  std::map<std::string, at::Tensor> taken_;
  GpuIntake intake_;
};

// Receives Weights() from the memory of the environment; the commit's status.
absl::Status Receive(std::map<std::string, at::Tensor>& applied) {
  const auto source = Snapshot(Weights(), std::nullopt).value();
  WeightManifest manifest = source->manifest();
  TensorSums sums;
  for (size_t i = 0; i + 1 < kSpecs.size(); ++i) sums.Add(kSpecs[i].name, source->sums()[i]);
  manifest.sent_digest = sums.Digest();
  manifest.chunk_bytes = 7;
  StagedWeightReceiver receiver(
      {kSpecs.begin(), kSpecs.end() - 1}, std::nullopt, /*num_token_ids=*/7, {},
      [&] { return std::make_unique<IntakeWeights>(applied); },
      {{.name = kSpeculatorComponent,
        .config = "{}",
        .parameters = {kSpecs.back()},
        .initial = {}}},
      /*allow_not_finite=*/false, {},
      [](const GpuMemory& memory) { return PeerMemory::Open(memory, kOtherGpu); });
  TANDEM_RETURN_IF_ERROR(receiver.Begin("u", manifest, false).status());
  TANDEM_ASSIGN_OR_RETURN(const auto memory, receiver.OpenGpuMemory(MemoryOfEnvironment()));
  for (int64_t i = 0; i < manifest.num_chunks(); ++i) {
    const FileRange range = {.offset = i * 7,
                             .size = std::min<int64_t>(7, manifest.total_bytes - i * 7)};
    TANDEM_RETURN_IF_ERROR(receiver.AppendShared("u", i, memory, {range}).status());
  }
  return receiver.Commit("u", {}).status();
}

TEST(OtherProcess, DISABLED_ReceivesTheWeights) {
  std::map<std::string, at::Tensor> applied;
  const absl::Status received = Receive(applied);
  ASSERT_TRUE(received.ok()) << received;
  const NamedTensors weights = Weights();
  for (size_t i = 0; i < kSpecs.size(); ++i) {
    const at::Tensor& tensor = applied.at(kSpecs[i].name);
    EXPECT_EQ(tensor.device(), kOtherGpu);
    EXPECT_TRUE(at::equal(tensor.cpu(), weights[i].second.cpu().to(ToScalarType(kSpecs[i].dtype))));
  }
}

TEST(OtherProcess, DISABLED_FindsOtherBytes) {
  std::map<std::string, at::Tensor> applied;
  EXPECT_EQ(Receive(applied).code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(applied.empty());
}

TEST(OtherProcess, DISABLED_FindsWhatIsNotFinite) {
  std::map<std::string, at::Tensor> applied;
  const absl::Status received = Receive(applied);
  EXPECT_EQ(Reason(received), "WEIGHTS_NOT_FINITE") << received;
  EXPECT_NE(received.message().find("\"b\" is not finite at value 4"), std::string::npos);
}

TEST(OtherProcess, DISABLED_CannotOpenTheMemory) {
  EXPECT_FALSE(PeerMemory::Open(MemoryOfEnvironment(), kGpu).ok());
}

TEST(OtherProcess, DISABLED_ReadsNoFurtherThanTheEnd) {
  const GpuMemory shared = MemoryOfEnvironment();
  const auto memory = PeerMemory::Open(shared, kGpu).value();
  std::vector<std::byte> bytes(static_cast<size_t>(shared.size));
  EXPECT_TRUE(memory->Read(0, absl::MakeSpan(bytes)).ok());
  EXPECT_EQ(memory->Read(1, absl::MakeSpan(bytes)).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(memory->Read(-1, absl::MakeSpan(bytes)).code(), absl::StatusCode::kDataLoss);
}

TEST(TransferTest, WeightsGoFromGpuToGpu) {
  NamedTensors weights = Weights();
  const auto snapshot = Snapshot(weights).value();
  // The trainer goes on with its weights.
  for (auto& [name, tensor] : weights) tensor.zero_();
  ASSERT_NE(snapshot->gpu_memory(), nullptr);
  EXPECT_EQ(snapshot->file(), nullptr);
  EXPECT_TRUE(PassesInAnotherProcess("ReceivesTheWeights", *snapshot->gpu_memory()));
  EXPECT_TRUE(PassesInAnotherProcess("ReadsNoFurtherThanTheEnd", *snapshot->gpu_memory()));
}

// A copy that is made again under a receiver that still reads it, as after a publication that the
// client gave up.
TEST(TransferTest, WeightsThatChangeWhileTheyAreReadAreDataLoss) {
  auto snapshot = Snapshot(Weights()).value();
  const GpuMemory memory = *snapshot->gpu_memory();
  snapshot.reset();
  NamedTensors others = Weights();
  for (auto& [name, tensor] : others) tensor.add_(1);
  const auto next = Snapshot(others).value();
  EXPECT_EQ(next->gpu_memory()->handle, memory.handle) << "the memory is used again";
  EXPECT_TRUE(PassesInAnotherProcess("FindsOtherBytes", memory));
}

// Shares its weights, says so, and waits for its end.
TEST(OtherProcess, DISABLED_SharesTheWeightsUntilItIsKilled) {
  const auto snapshot = Snapshot(Weights()).value();
  const int to = std::atoi(std::getenv("TANDEM_PEER_PIPE"));
  const std::string& handle = snapshot->gpu_memory()->handle;
  ASSERT_EQ(::write(to, handle.data(), handle.size()), std::ssize(handle));
  ::pause();
}

// CUDA's drivers keep memory that another process has opened; what is not opened is gone.
TEST(TransferTest, MemoryOfAProcessThatDiesIsReadToTheEndOrNotAtAll) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ::setenv("TANDEM_PEER_PIPE", std::to_string(ends[1]).c_str(), 1);
  const pid_t child = Start("SharesTheWeightsUntilItIsKilled", {});
  std::string handle(200, ' ');
  const ssize_t size = ::read(ends[0], handle.data(), handle.size());
  ASSERT_GT(size, 0);
  handle.resize(static_cast<size_t>(size));
  const auto in_file = Snapshot(Weights(), std::nullopt).value();
  const int64_t bytes = in_file->manifest().total_bytes;
  const GpuMemory shared = {.machine = MachineId(), .handle = handle, .size = bytes};
  const auto opened = PeerMemory::Open(shared, kGpu);
  ASSERT_TRUE(opened.ok()) << opened.status();
  ::kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  std::vector<std::byte> read(static_cast<size_t>(bytes)), expected = read;
  ASSERT_TRUE((*opened)->Read(0, absl::MakeSpan(read)).ok());
  ASSERT_TRUE(in_file->Read(0, absl::MakeSpan(expected)).ok());
  EXPECT_EQ(read, expected);
  EXPECT_FALSE(PeerMemory::Open(shared, kGpu).ok());
}

TEST(TransferTest, WeightsThatAreNotFiniteAreRefused) {
  NamedTensors weights = Weights();
  weights[1].second.view({-1}).narrow(0, 4, 2).fill_(std::numeric_limits<float>::infinity());
  const auto snapshot = Snapshot(weights).value();
  EXPECT_TRUE(PassesInAnotherProcess("FindsWhatIsNotFinite", *snapshot->gpu_memory()));
}

TEST(TransferTest, OtherMemoryIsNotOpened) {
  const auto snapshot = Snapshot(Weights()).value();
  const GpuMemory memory = *snapshot->gpu_memory();
  GpuMemory wrong = memory;
  wrong.machine = "another";
  EXPECT_EQ(PeerMemory::Open(wrong, kGpu).status().code(), absl::StatusCode::kFailedPrecondition);
  wrong.machine = memory.machine;
  wrong.offset = -1;
  EXPECT_EQ(PeerMemory::Open(wrong, kGpu).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(PeerMemory::Open(memory, kGpu).ok()) << "CUDA opens no memory of its own process";
  EXPECT_EQ(PeerMemory::Open(memory, at::kCPU).status().code(), absl::StatusCode::kUnimplemented);
  for (const char* handle : {"1 999 1 1 0 8", "", "x"}) {
    wrong = memory;
    wrong.handle = handle;
    EXPECT_TRUE(PassesInAnotherProcess("CannotOpenTheMemory", wrong)) << handle;
  }
}

TEST(TransferTest, ACopyOnAGpuHasTheSumsAndBytesOfOneInAFile) {
  const NamedTensors weights = Weights();
  const int64_t before = TheCounts().synchronizations;
  const auto on_gpu = Snapshot(weights).value();
  EXPECT_LE(TheCounts().synchronizations - before, 6) << "not one for each tensor";
  const auto in_file = Snapshot(weights, std::nullopt).value();
  EXPECT_EQ(on_gpu->manifest(), in_file->manifest());
  ASSERT_EQ(on_gpu->sums().size(), kSpecs.size());
  for (size_t i = 0; i < kSpecs.size(); ++i) EXPECT_EQ(on_gpu->sums()[i], in_file->sums()[i]) << i;
  std::vector<std::byte> a(static_cast<size_t>(on_gpu->manifest().total_bytes)), b = a;
  ASSERT_TRUE(on_gpu->Read(0, absl::MakeSpan(a)).ok());
  ASSERT_TRUE(in_file->Read(0, absl::MakeSpan(b)).ok());
  EXPECT_EQ(a, b);
  ASSERT_TRUE(on_gpu->Read(9, absl::MakeSpan(a).first(5)).ok());
  EXPECT_EQ(std::memcmp(a.data(), b.data() + 9, 5), 0);
}

// No sums are waited for: their digest is known.
TEST(TransferTest, ACopyInFloat32IsThereWhenItIsOffered) {
  const NamedTensors weights = {{"w", at::arange(5.0, at::device(kGpu).dtype(at::kFloat))}};
  const auto snapshot =
      MakeWeightSnapshot({{.name = "w", .shape = {5}}}, SourceOf(weights),
                         {.version = 3, .digest = WeightsDigest(weights)}, 7, {}, "", kPlace)
          .value();
  ASSERT_NE(snapshot->gpu_memory(), nullptr);
  EXPECT_TRUE(snapshot->sums().empty());
  std::vector<float> read(5);
  ASSERT_TRUE(snapshot->Read(0, {reinterpret_cast<std::byte*>(read.data()), 20}).ok());
  EXPECT_EQ(read, std::vector<float>({0, 1, 2, 3, 4}));
}

TEST(TransferTest, ACopyThatIsNotPlannedIsInAFile) {
  const auto snapshot =
      Snapshot(Weights(), GpuPlace{.device = kGpu, .most_bytes = 45}).value();  // 46 bytes
  EXPECT_EQ(snapshot->gpu_memory(), nullptr);
  EXPECT_NE(snapshot->file(), nullptr);
  EXPECT_NE(Snapshot(Weights(), GpuPlace{.device = kGpu, .most_bytes = 46}).value()->gpu_memory(),
            nullptr);
}

TEST(TransferTest, WeightsOfAnotherDigestAreNotCopied) {
  const NamedTensors weights = Weights();
  EXPECT_EQ(MakeWeightSnapshot(kSpecs, SourceOf(weights),
                               {.version = 3, .digest = std::string(32, '0')}, 7, {}, "", kPlace)
                .status()
                .code(),
            absl::StatusCode::kDataLoss);
}

TEST(TransferDeathTest, MemoryIsSharedOnceItIsWritten) {
  const at::Tensor bytes = at::zeros({8}, at::device(kGpu).dtype(at::kByte));
  EXPECT_DEATH(ShareMemory(bytes).IgnoreError(), "shared while a stream may still write");
  c10::impl::VirtualGuardImpl(at::kCUDA).synchronizeDevice(0);
  EXPECT_TRUE(ShareMemory(bytes).ok());
}

}  // namespace
}  // namespace tandem::simulated_gpu
