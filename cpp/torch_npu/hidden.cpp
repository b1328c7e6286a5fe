// What torch_npu's own inline functions call and libtorch_npu.so does not export (all releases up to 2.14 hide it). A class derived from its allocator makes
// those bodies, so they have to be found; the version script keeps them in this library. They say what a failed call of ACL's was, and no more.

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
// 0: nothing is pending, so that the code at hand is the one that is told.
aclError AclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
}  // namespace acl

namespace option {
bool OptionsManager::IsCompactErrorOutput() { return false; }
bool OptionsManager::IsOomSnapshotEnable() { return false; }
void oom_observer(std::int64_t, std::int64_t, std::int64_t, std::int64_t) {}
}  // namespace option

}  // namespace c10_npu
