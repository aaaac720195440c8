// The commands of a server's engine: rank 0 announces a command, and every other rank looks its
// name up here and executes it (docs/adr/0023).
#ifndef TANDEM_COMMON_RANKS_COMMAND_TABLE_H_
#define TANDEM_COMMON_RANKS_COMMAND_TABLE_H_

#include <functional>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "common/base/errors/status_macros.h"
#include "common/base/struct_bytes.h"

namespace tandem::ranks {

// A command on its way between the ranks.
struct RankCommand {
  std::string name;        // empty: rank 0 has no more commands
  std::string request_id;  // of the client's call, for logs
  std::string request;     // the bytes of a struct (common/base/struct_bytes.h)
};

class CommandTable {
 public:
  // The body of a command on a rank other than 0. An error ends the server.
  template <typename Request>
  using Execute =
      std::function<absl::Status(const std::string& request_id, const Request& request)>;

  // Adds a command. Every name is added once; all are added before the first command runs.
  template <typename Request>
  void Add(const std::string& name, Execute<Request> execute) {
    AddBytes(name, [execute = std::move(execute)](const RankCommand& command) -> absl::Status {
      TANDEM_ASSIGN_OR_RETURN(const Request request, FromBytes<Request>(command.request));
      return execute(command.request_id, request);
    });
  }

  // Executes an announced command. INTERNAL for a name that was not added, or for bytes that are no
  // request of that command; the message of every error begins with the command's name.
  absl::Status Run(const RankCommand& command) const;

 private:
  using ExecuteBytes = std::function<absl::Status(const RankCommand& command)>;
  void AddBytes(const std::string& name, ExecuteBytes execute);

  std::map<std::string, ExecuteBytes> commands_;
};

}  // namespace tandem::ranks

#endif  // TANDEM_COMMON_RANKS_COMMAND_TABLE_H_
