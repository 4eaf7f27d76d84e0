//! A kernel that writes to an illegal address on purpose.

use std::ffi::CString;
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use cudarc::driver::result::module;
use vramq_inference::device::Device as _;
use vramq_inference::device::cuda::CudaDevice;

/// Writes to an address that is nobody's.
const PTX: &str = "
.version 6.4
.target sm_75
.address_size 64
.visible .entry crash() {
    .reg .b64 %address;
    .reg .b32 %value;
    mov.u64 %address, 256;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
";

/// Runs it, and says by which error the device was lost.
pub fn crash(device: &Arc<CudaDevice>) -> Result<()> {
    device.bind()?;
    let image = CString::new(PTX)?;
    // SAFETY: the image is a text in PTX that ends with a zero.
    let loaded = unsafe { module::load_data(image.as_ptr().cast()) };
    let loaded = loaded.map_err(|error| device.failed("load a kernel", 0, error))?;
    // SAFETY: the module is loaded.
    let function = unsafe { module::get_function(loaded, CString::new("crash")?) };
    let function = function.map_err(|error| device.failed("find a kernel", 0, error))?;
    // SAFETY: the kernel takes no parameters. What it does is undefined for the device's context only, which this process uses
    // no more.
    let launched = unsafe { device.launch(function, (1, 1), 1, &mut []) };
    let ended = launched.and_then(|()| device.synchronize());
    let Err(error) = ended else { bail!("the kernel ended well") };
    let lost = device.lost();
    ensure!(lost.as_ref().is_some_and(|loss| !loss.is_late), "{error}, and the device counts as {lost:?}");
    let again = device.alloc(1 << 20).err();
    ensure!(again == Some(error), "{error}, and then {again:?}");
    println!("{error}");
    Ok(())
}
