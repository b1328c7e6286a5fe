//! Calls with counters and injected failures.

standin::counted_calls! {
    cuMemAddressReserve, cuMemAddressFree, cuMemCreate, cuMemRelease, cuMemMap, cuMemUnmap, cuMemSetAccess, cuEventCreate,
    cuEventDestroy_v2, cuEventRecord, cuEventQuery, cuStreamWaitEvent, cuEventSynchronize, cuStreamIsCapturing,
    cuMemGetInfo_v2, cuStreamCreate, cuStreamDestroy_v2, cuMemHostRegister_v2, cuMemHostUnregister, cuMemcpyDtoHAsync_v2,
    cuMemcpyHtoDAsync_v2, cuMemsetD32Async, cuGraphInstantiateWithFlags, cuGraphExecUpdate_v2, cuGraphExecDestroy,
    cuStreamGetCaptureInfo_v3, cuStreamUpdateCaptureDependencies_v2, cuGraphExecMemcpyNodeSetParams, cuGraphNodeSetEnabled
}
