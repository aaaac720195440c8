// The bound of a message on the wire, for servers and for the channels between them.
#ifndef TANDEM_COMMON_RPC_MESSAGE_SIZE_H_
#define TANDEM_COMMON_RPC_MESSAGE_SIZE_H_

namespace tandem::rpc {

inline constexpr int kMaxReceiveBytes = 4 << 20;

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_MESSAGE_SIZE_H_
