//! Calls with counters and injected failures.

standin::counted_calls! {
    aclrtReserveMemAddress, aclrtReleaseMemAddress, aclrtMallocPhysical, aclrtFreePhysical, aclrtMapMem, aclrtUnmapMem,
    aclrtCreateEventExWithFlag, aclrtDestroyEvent, aclrtRecordEvent, aclrtQueryEventStatus, aclrtStreamWaitEvent,
    aclrtSynchronizeEvent, aclmdlRICaptureGetInfo, aclrtGetMemInfo, aclrtCreateStream, aclrtDestroyStream, aclrtStreamQuery, aclrtHostRegisterV2,
    aclrtHostUnregister, aclrtMemcpyAsync, aclrtMemsetAsync, aclrtMemsetD32Async
}
