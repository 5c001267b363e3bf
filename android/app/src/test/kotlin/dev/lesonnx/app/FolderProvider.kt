package dev.lesonnx.app

import android.content.ContentProvider
import android.content.ContentValues
import android.database.Cursor
import android.database.MatrixCursor
import android.net.Uri
import android.os.ParcelFileDescriptor
import android.provider.DocumentsContract
import android.provider.DocumentsContract.Document
import java.io.File

/** A document provider over a real folder: documents are called by their paths in it, after `root`. */
class FolderProvider : ContentProvider() {
    override fun onCreate() = true

    override fun query(uri: Uri, columns: Array<String>?, selection: String?, arguments: Array<String>?, order: String?): Cursor {
        val cursor = MatrixCursor(columns)
        val document = file(DocumentsContract.getDocumentId(uri))
        val files = if (uri.lastPathSegment == "children") document.listFiles().orEmpty().toList() else listOf(document)
        for (file in files) {
            cursor.addRow(
                columns!!.map {
                    when (it) {
                        Document.COLUMN_DOCUMENT_ID -> "root/${file.relativeTo(folder).path}"
                        Document.COLUMN_DISPLAY_NAME -> file.name
                        else -> if (file.isDirectory) Document.MIME_TYPE_DIR else "application/octet-stream"
                    }
                },
            )
        }
        return cursor
    }

    override fun openFile(uri: Uri, mode: String): ParcelFileDescriptor =
        ParcelFileDescriptor.open(file(DocumentsContract.getDocumentId(uri)), ParcelFileDescriptor.MODE_READ_ONLY)

    private fun file(document: String) = File(folder, document.removePrefix("root").removePrefix("/"))

    override fun getType(uri: Uri): String? = null

    override fun insert(uri: Uri, values: ContentValues?): Uri? = null

    override fun delete(uri: Uri, selection: String?, arguments: Array<String>?) = 0

    override fun update(uri: Uri, values: ContentValues?, selection: String?, arguments: Array<String>?) = 0

    companion object {
        const val AUTHORITY = "dev.lesonnx.test"
        lateinit var folder: File
    }
}
