// Stubs for functions called by torch_npu's inline functions but not exported by libtorch_npu.so
// (all releases up to 2.14). The version script keeps them local. A failed ACL call is reported
// with its code only.

#include <string>

#include <acl/acl.h>
#include <torch_npu/csrc/core/npu/NPUException.h>
#include <torch_npu/csrc/core/npu/interface/AclInterface.h>
#include <torch_npu/csrc/core/npu/register/OptionsManager.h>

std::string formatErrorCode(SubModule, ErrCode) { return {}; }

namespace c10_npu {

std::string getDeviceErrorMessage(int) { return {}; }
bool isCannOOM(const std::string&) { return false; }

namespace acl {
// Returns 0 (no pending error), so the error at hand is reported.
aclError AclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
}  // namespace acl

namespace option {
bool OptionsManager::IsCompactErrorOutput() { return false; }
bool OptionsManager::IsOomSnapshotEnable() { return false; }
void oom_observer(std::int64_t, std::int64_t, std::int64_t, std::int64_t) {}
}  // namespace option

}  // namespace c10_npu
