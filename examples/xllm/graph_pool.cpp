#include <glog/logging.h>

#include <vmmgraph/torch.hpp>

#include "cuda_graph_executor_impl.h"

namespace xllm::runtime::cuda {

struct CudaGraphExecutorImpl::VmmPoolState {
  std::shared_ptr<vmmgraph::SharedVmmAllocator> allocator;
  std::shared_ptr<vmmgraph::torch::TorchAllocator> torch_allocator;
  std::unordered_map<uint32_t, std::unique_ptr<TorchMemPool>> mempools_by_shape;
};

CudaGraphExecutorImpl::VmmPoolState&
CudaGraphExecutorImpl::get_or_create_vmm_pool_state(uint32_t physical_pool_id) {
  std::lock_guard<std::mutex> lock(vmm_mutex_);
  auto& slot = vmm_pools_[physical_pool_id];
  if (!slot) {
    auto state = std::make_unique<VmmPoolState>();
    state->allocator =
        std::make_shared<vmmgraph::SharedVmmAllocator>(device_.index());
    state->torch_allocator = vmmgraph::torch::make_allocator(state->allocator);
    slot = std::move(state);
    LOG(INFO) << "Created VMM pool state for executor " << this << ", device "
              << device_.index() << ", physical_pool_id: " << physical_pool_id;
  }
  return *slot;
}

TorchMemPool* CudaGraphExecutorImpl::get_or_create_vmm_mempool(
    uint32_t physical_pool_id, uint32_t shape_id) {
  VmmPoolState& state = get_or_create_vmm_pool_state(physical_pool_id);
  std::lock_guard<std::mutex> lock(vmm_mutex_);
  auto& mempools = state.mempools_by_shape;
  auto it = mempools.find(shape_id);
  if (it != mempools.end()) {
    return it->second.get();
  }
#if TORCH_VERSION_MAJOR >= 2 && TORCH_VERSION_MINOR >= 11
  const auto& torch_allocator = state.torch_allocator;
#else
  auto* const torch_allocator = state.torch_allocator.get();
#endif
  auto pool = std::make_unique<TorchMemPool>(torch_allocator,
                                             /*is_user_created=*/true);
  TorchMemPool* ptr = pool.get();
  mempools[shape_id] = std::move(pool);
  return ptr;
}

}  // namespace xllm::runtime::cuda
