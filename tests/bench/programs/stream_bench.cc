// A plain gRPC stream over loopback, the peer of a publication of weights: messages of 1 MiB, which
// the receiver, a process of its own, parses and drops. Each line of the input is a number of bytes
// to send; the answer is {} when they have arrived (tests/bench/rollout/driven.py).
#include <grpcpp/grpcpp.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "tandem/weights/v1/weights.grpc.pb.h"

namespace tandem {
namespace {

constexpr int64_t kMessageBytes = 1 << 20;

class Receiver final : public weights::v1::WeightService::Service {
 public:
  grpc::Status UploadWeights(grpc::ServerContext*,
                             grpc::ServerReader<weights::v1::UploadWeightsRequest>* reader,
                             weights::v1::UploadWeightsResponse* response) override {
    weights::v1::UploadWeightsRequest message;
    int64_t bytes = 0;
    while (reader->Read(&message)) bytes += static_cast<int64_t>(message.data().size());
    response->set_next_chunk(bytes);
    return grpc::Status::OK;
  }
};

// Serves until the other end of `parent` is closed; writes its port to `port_pipe`.
void Receive(int parent, int port_pipe) {
  Receiver receiver;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(2 * kMessageBytes);
  builder.RegisterService(&receiver);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr || write(port_pipe, &port, sizeof(port)) != sizeof(port)) std::exit(1);
  char end = 0;
  while (read(parent, &end, 1) > 0) continue;
  server->Shutdown();
}

void Send(weights::v1::WeightService::Stub& receiver, int64_t bytes) {
  grpc::ClientContext context;
  weights::v1::UploadWeightsResponse response;
  const auto stream = receiver.UploadWeights(&context, &response);
  weights::v1::UploadWeightsRequest message;
  for (int64_t sent = 0; sent < bytes; sent += kMessageBytes) {
    message.mutable_data()->resize(static_cast<size_t>(std::min(kMessageBytes, bytes - sent)));
    if (!stream->Write(message)) break;
  }
  stream->WritesDone();
  const grpc::Status status = stream->Finish();
  if (!status.ok() || response.next_chunk() != bytes) {
    std::cerr << response.next_chunk() << " of " << bytes << " bytes: " << status.error_message()
              << "\n";
    std::exit(1);
  }
}

int Main() {
  int port_pipe[2], life_pipe[2];
  if (pipe(port_pipe) != 0 || pipe(life_pipe) != 0) return 1;
  const pid_t child = fork();  // before gRPC has threads
  if (child == 0) {
    close(life_pipe[1]);
    Receive(life_pipe[0], port_pipe[1]);
    return 0;
  }
  close(life_pipe[0]);
  close(port_pipe[1]);  // so that the read fails if the receiver dies
  int port = 0;
  if (child < 0 || read(port_pipe[0], &port, sizeof(port)) != sizeof(port)) return 1;
  const auto stub = weights::v1::WeightService::NewStub(
      grpc::CreateChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials()));
  std::cout << "{}" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    Send(*stub, std::stoll(line));
    std::cout << "{}" << std::endl;
  }
  close(life_pipe[1]);
  return waitpid(child, nullptr, 0) == child ? 0 : 1;
}

}  // namespace
}  // namespace tandem

int main() { return tandem::Main(); }
