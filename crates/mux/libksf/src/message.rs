//! `ksf_message`: a message that C owns.

use std::ffi::{c_int, c_void};

use ksf_mux::Message;

use crate::boundary::{at, bytes, call, quiet};

/// The message's bytes.
///
/// # Safety
///
/// `message` is null or comes from a receiving call and is not freed; `count` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_message_data(message: *const Message, count: *mut usize) -> *const c_void {
    // SAFETY: both pointers are as the header demands.
    quiet(std::ptr::null(), || unsafe {
        let message = message.as_ref();
        if let Some(count) = count.as_mut() {
            *count = message.map_or(0, |message| message.len());
        }
        message.map_or(std::ptr::null(), |message| message.as_ptr().cast())
    })
}

/// The connection it came from; of no message: one that does not exist.
///
/// # Safety
///
/// `message` is null or comes from a receiving call and is not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_message_connection(message: *const Message) -> u64 {
    // SAFETY: the pointer is as the header demands.
    quiet(u64::MAX, || unsafe { message.as_ref() }.map_or(u64::MAX, |message| message.connection().to_u64()))
}

/// Answers to its connection.
///
/// # Safety
///
/// `message` is null or comes from a receiving call and is not freed; there are `count` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_message_reply(message: *mut Message, body: *const c_void, count: usize) -> c_int {
    call(|| {
        // SAFETY: the pointers are as the header demands.
        let (message, body) = unsafe { (at(message, "message")?, bytes(body, count)?) };
        message.reply(body)?;
        Ok(0)
    })
}

/// Done with a message.
///
/// # Safety
///
/// `message` is null or comes from a receiving call and is not freed; no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_message_free(message: *mut Message) {
    quiet((), || {
        if !message.is_null() {
            // SAFETY: receiving calls make it with Box::into_raw, and the caller frees it once.
            drop(unsafe { Box::from_raw(message) });
        }
    });
}
